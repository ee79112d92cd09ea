// The settings of a call as Python and C give them, and how txl::Attention gets them.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention.h"

namespace txl {

struct Settings {
#define TXL_SETTING(type, enumerator, name) type name = 0;
  TXL_SETTINGS(TXL_SETTING)
#undef TXL_SETTING
};

// Sets all settings. drop_below: 0 for no dropout. `left` and `right` remain as they are, INT64_MAX for all keys.
inline void set_settings(Attention& a, const Settings& s, uint32_t drop_below) {
  a.left = s.left, a.right = s.right;
  a.zero_row = s.zero_row, a.zero_outside = s.zero_outside != 0;
  a.scale = static_cast<float>(s.scale), a.position_scale = static_cast<float>(s.position_scale);
  a.softcap = static_cast<float>(s.softcap);
  a.drop_below = drop_below;
  a.keep_scale = drop_below ? 65536.f / static_cast<float>(65536 - drop_below) : 1;
}

// Sets the length of the memory, and limits `left` and `right` to the number of keys.
inline void set_memory(Attention& a, int64_t M) {
  a.M = M;
  a.left = std::min(a.left, M + a.L), a.right = std::min(a.right, M + a.L);
}

}  // namespace txl
