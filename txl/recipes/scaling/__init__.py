"""What training by many GPUs takes, on paper: memory a device, bytes moved, time (docs/scaling.md).

Bytes are counted, and tests compare them with torch's own counters; times are predicted from
vendors' figures and the assumptions in `hardware.py`: no GPU has timed them.
"""
