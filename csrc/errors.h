// Errors of a library's functions: codes, and a message for each thread.
#pragma once
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>

#include "include/txl_attention.h"

namespace txl {

// The message of this thread's last error.
inline thread_local char g_error[1024] = "";

inline int fail(int code, const char* message) {
  std::snprintf(g_error, sizeof g_error, "%s", message);
  return code;
}

// Runs f and returns the code of the exception that it throws, whose message becomes the last error.
template <class F>
int guard(const F& f) noexcept {
  try {
    f();
    return TXL_OK;
  } catch (const std::bad_alloc&) {
    return fail(TXL_OUT_OF_MEMORY, "out of memory");
  } catch (const std::invalid_argument& error) {
    return fail(TXL_INVALID_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return fail(TXL_FAILED, error.what());
  } catch (...) {  // by a function of the caller's
    return fail(TXL_FAILED, "an exception that is not a std::exception");
  }
}

}  // namespace txl
