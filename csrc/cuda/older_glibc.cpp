// Functions that CUDA's static runtime takes from libpthread, libdl and librt. glibc 2.34 has moved them to libc under
// a new version, so a library linked there would not load on an older system. Each name here jumps to the function's
// older version, which every glibc has.
#if defined(__linux__) && defined(__x86_64__)
#include <features.h>

#if __GLIBC_PREREQ(2, 34)

#define TXL_OLDER(name, version)                                                                              \
  __asm__(".text\n.symver txl_older_" #name ", " #name "@GLIBC_" version                                      \
          "\n"                                                                                                \
          ".globl " #name "\n.hidden " #name "\n.type " #name ", @function\n" #name ": jmp *txl_older_" #name \
          "@GOTPCREL(%rip)\n");

TXL_OLDER(dlclose, "2.2.5")
TXL_OLDER(dlerror, "2.2.5")
TXL_OLDER(dlmopen, "2.3.4")
TXL_OLDER(dlopen, "2.2.5")
TXL_OLDER(dlsym, "2.2.5")
TXL_OLDER(dlvsym, "2.2.5")
TXL_OLDER(pthread_condattr_setpshared, "2.2.5")
TXL_OLDER(pthread_create, "2.2.5")
TXL_OLDER(pthread_detach, "2.2.5")
TXL_OLDER(pthread_getspecific, "2.2.5")
TXL_OLDER(pthread_join, "2.2.5")
TXL_OLDER(pthread_key_create, "2.2.5")
TXL_OLDER(pthread_key_delete, "2.2.5")
TXL_OLDER(pthread_kill, "2.2.5")
TXL_OLDER(pthread_mutex_trylock, "2.2.5")
TXL_OLDER(pthread_mutexattr_destroy, "2.2.5")
TXL_OLDER(pthread_mutexattr_init, "2.2.5")
TXL_OLDER(pthread_mutexattr_setpshared, "2.2.5")
TXL_OLDER(pthread_mutexattr_settype, "2.2.5")
TXL_OLDER(pthread_once, "2.2.5")
TXL_OLDER(pthread_rwlock_destroy, "2.2.5")
TXL_OLDER(pthread_rwlock_init, "2.2.5")
TXL_OLDER(pthread_rwlock_rdlock, "2.2.5")
TXL_OLDER(pthread_rwlock_timedrdlock, "2.2.5")
TXL_OLDER(pthread_rwlock_timedwrlock, "2.2.5")
TXL_OLDER(pthread_rwlock_tryrdlock, "2.2.5")
TXL_OLDER(pthread_rwlock_trywrlock, "2.2.5")
TXL_OLDER(pthread_rwlock_unlock, "2.2.5")
TXL_OLDER(pthread_rwlock_wrlock, "2.2.5")
TXL_OLDER(pthread_rwlockattr_destroy, "2.2.5")
TXL_OLDER(pthread_rwlockattr_init, "2.2.5")
TXL_OLDER(pthread_rwlockattr_setpshared, "2.2.5")
TXL_OLDER(pthread_setspecific, "2.2.5")
TXL_OLDER(pthread_spin_destroy, "2.2.5")
TXL_OLDER(pthread_spin_init, "2.2.5")
TXL_OLDER(pthread_spin_lock, "2.2.5")
TXL_OLDER(pthread_spin_trylock, "2.2.5")
TXL_OLDER(pthread_spin_unlock, "2.2.5")
TXL_OLDER(sem_destroy, "2.2.5")
TXL_OLDER(sem_init, "2.2.5")
TXL_OLDER(sem_post, "2.2.5")
TXL_OLDER(sem_timedwait, "2.2.5")
TXL_OLDER(sem_trywait, "2.2.5")
TXL_OLDER(sem_wait, "2.2.5")
TXL_OLDER(shm_open, "2.2.5")
TXL_OLDER(shm_unlink, "2.2.5")

#endif
#endif
