// Symbols that GCC 11 and newer take from a libstdc++ or a glibc newer than those of manylinux 2.28. The module has its
// own, so that it loads on a system older than the one that has compiled it.
#include <exception>
#include <new>

#if defined(__GLIBC__) && defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 11

// GLIBC_2.32: whether the process has one thread, which makes counting references cheaper. 0: it may have more.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;

// The copy constructor and the destructor that every libstdc++ exports.
extern "C" void txl_copy(void* to, const void* from) noexcept __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
extern "C" void txl_destroy(void* pointer) noexcept __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

namespace std {
// GLIBCXX_3.4.29
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

// CXXABI_1.3.13
void __exception_ptr::exception_ptr::_M_addref() noexcept {
  void* copy;  // is not destroyed, so its reference remains
  txl_copy(&copy, this);
}
void __exception_ptr::exception_ptr::_M_release() noexcept { txl_destroy(this); }
}  // namespace std

#endif
