"""A plugin of pytest (-p gpu_kit.pytest_cache): kernels are looked up under the carried names."""

from gpu_kit import caches, dry, places

caches.adopt(places.CARRIED, dry.CAPABILITY)
