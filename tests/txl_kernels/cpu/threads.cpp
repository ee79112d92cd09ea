// A user's program whose threads are cancelled, whose function throws, or which unloads the library: each argument
// names one function below. Exits with 0, or with the line of the first condition that does not hold.
#include <dlfcn.h>
#include <pthread.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "txl_attention.h"

#define REQUIRE(holds) \
  if (!(holds)) std::fprintf(stderr, "%s, error: %s\n", #holds, last_error()), std::_Exit(__LINE__ % 255 + 1)

namespace {

// The library, and its functions.
const char* file;
void* library;
decltype(&txl_forward) forward;
decltype(&txl_forward_on) forward_on;
decltype(&txl_backward) backward;
decltype(&txl_set_threads) set_threads;
decltype(&txl_last_error) last_error;

void load() {
  library = dlopen(file, RTLD_NOW);
  if (!library) std::fprintf(stderr, "%s\n", dlerror()), std::exit(255);
#define FIND(name) name = reinterpret_cast<decltype(name)>(dlsym(library, "txl_" #name))
  FIND(forward), FIND(forward_on), FIND(backward), FIND(set_threads), FIND(last_error);
  REQUIRE(set_threads(4) == TXL_OK);
}

// A causal call, its results and its gradients.
struct Example {
  static constexpr int H = 4, D = 8;
  const int L;
  std::vector<float> q, r, out, dq, lse;
  txl_call call = {};
  txl_gradients gradients = {};

  explicit Example(int queries = 150)
      : L(queries), q(H * L * D), r(H * L * D), out(H * L * D), dq(H * L * D), lse(H * L) {
    for (size_t n = 0; n < q.size(); ++n) q[n] = std::sin(static_cast<float>(n)), r[n] = std::cos(3.f * n);
    call.struct_size = sizeof call, call.B = 1, call.H = call.Hkv = H, call.L = call.T = L;
    call.D = call.Dv = call.Dp = D, call.left = TXL_ALL, call.scale = call.position_scale = 0.3;
    call.q = call.k = call.v = rows(q), call.out = rows(out), call.lse = lse.data();
    call.r = {r.data(), {L * D, D, 1, 0}};
    gradients.struct_size = sizeof gradients, gradients.out = rows(out), gradients.q = rows(dq);
  }
  txl_tensor rows(std::vector<float>& x) const { return {x.data(), {H * L * D, L * D, D, 1}}; }
};

// Runs f(argument) on a new thread; returns what it returns.
void* on_a_thread(void* (*f)(void*), void* argument) {
  pthread_t thread;
  void* result = nullptr;
  REQUIRE(pthread_create(&thread, nullptr, f, argument) == 0);
  REQUIRE(pthread_join(thread, &result) == 0);
  return result;
}

// The out of Example(), by a thread that has ended.
const std::vector<float>& wanted() {
  static Example x;
  static void* const done = on_a_thread(
      [](void* p) -> void* { return forward(&static_cast<Example*>(p)->call) == TXL_OK ? p : nullptr; }, &x);
  REQUIRE(done == &x);
  return x.out;
}

void run_in_order(void*, void (*task)(void*, size_t), void* data, size_t tasks) {
  for (size_t n = 0; n < tasks; ++n) task(data, n);
}

// A thread that is cancelled during a call ends after it; the call's results are complete.
void cancelled() {
  static const txl_parallel_for canceling = [](void* context, void (*task)(void*, size_t), void* data, size_t tasks) {
    pthread_cancel(pthread_self());
    pthread_testcancel();
    run_in_order(context, task, data, tasks);
  };
  for (const int type : {PTHREAD_CANCEL_DEFERRED, PTHREAD_CANCEL_ASYNCHRONOUS}) {
    Example x;
    struct Argument {
      Example& example;
      int type;
      bool returned;
    } argument = {x, type, false};
    void* const result = on_a_thread(
        [](void* p) -> void* {
          Argument& a = *static_cast<Argument*>(p);
          pthread_setcanceltype(a.type, nullptr);
          forward_on(&a.example.call, canceling, nullptr);
          a.returned = true;
          pthread_testcancel();
          return nullptr;
        },
        &argument);
    // glibc 2.36 ends a thread that is cancelled asynchronously with the result NULL.
    REQUIRE(result == PTHREAD_CANCELED || type == PTHREAD_CANCEL_ASYNCHRONOUS);
    REQUIRE(argument.returned == (type == PTHREAD_CANCEL_DEFERRED));
    REQUIRE(x.out == wanted());
  }
  // On the library's threads, for which a call waits.
  Example x;
  void* const result = on_a_thread(
      [](void* p) -> void* {
        Example& example = *static_cast<Example*>(p);
        pthread_cancel(pthread_self());
        for (int n = 0; n < 200; ++n)
          REQUIRE(forward(&example.call) == TXL_OK && backward(&example.call, &example.gradients) == TXL_OK);
        pthread_testcancel();
        return nullptr;
      },
      &x);
  REQUIRE(result == PTHREAD_CANCELED);
  REQUIRE(x.out == wanted());
}

// An exception of the caller's function is an error of the call, of whatever type it is.
void throwing() {
  Example x;
  const auto throws_integer = [](void*, void (*)(void*, size_t), void*, size_t) { throw 3; };
  const auto throws_exception = [](void*, void (*)(void*, size_t), void*, size_t) { throw std::bad_alloc(); };
  REQUIRE(forward_on(&x.call, throws_integer, nullptr) == TXL_FAILED);
  REQUIRE(!std::strcmp(last_error(), "an exception that is not a std::exception"));
  REQUIRE(forward_on(&x.call, throws_exception, nullptr) == TXL_OUT_OF_MEMORY);
  REQUIRE(forward_on(&x.call, run_in_order, nullptr) == TXL_OK);
  REQUIRE(x.out == wanted());
}

// A call that the caller's function makes runs on the library's threads, and the outer one goes on by the function.
void nested() {
  static int calls = 0;
  Example x;
  const auto makes_a_call = [](void* context, void (*task)(void*, size_t), void* data, size_t tasks) {
    REQUIRE(++calls < 10);
    Example inner;
    REQUIRE(forward(&inner.call) == TXL_OK);
    REQUIRE(inner.out == wanted());
    REQUIRE(backward(&inner.call, &inner.gradients) == TXL_OK);
    REQUIRE(forward_on(&inner.call, run_in_order, nullptr) == TXL_OK);
    run_in_order(context, task, data, tasks);
  };
  wanted();
  REQUIRE(forward_on(&x.call, makes_a_call, nullptr) == TXL_OK);
  REQUIRE(calls > 0);
  REQUIRE(x.out == wanted());
}

// The library stays when it is unloaded, and works when it is loaded again.
void unloaded() {
  for (int n = 0; n < 5; ++n) {
    Example x;
    on_a_thread(
        [](void* p) -> void* {
          Example& example = *static_cast<Example*>(p);
          REQUIRE(forward(&example.call) == TXL_OK && backward(&example.call, &example.gradients) == TXL_OK);
          return nullptr;
        },
        &x);
    REQUIRE(x.out == wanted());
    dlclose(library);
    REQUIRE(dlopen(file, RTLD_NOW | RTLD_NOLOAD));
    load();
  }
}

// A call in a destructor of a thread's data, and one in a function of atexit: the thread-local and the static objects
// of the library are destroyed before.
void at_the_end() {
  static Example first(2);
  static const auto call_again = [] {
    Example x(2);
    // Blocks of the sizes that calls allocate: if the library used one that it has freed, its bytes would change.
    std::vector<std::vector<unsigned char>> blocks;
    for (size_t bytes = 64; bytes <= 8192; bytes += 16)
      for (int n = 0; n < 3; ++n) blocks.emplace_back(bytes, 0xA5);
    REQUIRE(forward(&x.call) == TXL_OK);
    REQUIRE(x.out == first.out);
    for (const auto& block : blocks)
      for (const unsigned char byte : block) REQUIRE(byte == 0xA5);
  };
  static pthread_key_t key;
  REQUIRE(std::atexit([] { call_again(); }) == 0);
  REQUIRE(pthread_key_create(&key, [](void*) { call_again(); }) == 0);
  on_a_thread(
      [](void*) -> void* {
        REQUIRE(forward(&first.call) == TXL_OK);
        pthread_setspecific(key, &key);
        return nullptr;
      },
      nullptr);
}

}  // namespace

int main(int, char** arguments) {
  file = arguments[1];
  load();
#define RUN(name) \
  if (arguments[2] == std::string(#name)) return name(), 0
  RUN(cancelled);
  RUN(throwing);
  RUN(nested);
  RUN(unloaded);
  RUN(at_the_end);
  return 254;
}
