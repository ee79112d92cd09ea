// Working memory laid out once: the same code that takes the pieces tells, on a dry run, how much
// they need.

class Arena {
 public:
  explicit Arena(float* at) : at_(at) {}  // null for a dry run

  // The next `count` floats, from a multiple of 64 bytes on; null on a dry run.
  float* take(int64_t count) {
    float* const piece = at_ ? at_ + used_ : nullptr;
    used_ += round_up(count, 16);
    return piece;
  }
  // The same for elements of another size.
  template <class C>
  C* take(int64_t count) {
    return reinterpret_cast<C*>(take(div_up(count * static_cast<int64_t>(sizeof(C)), sizeof(float))));
  }
  int64_t used() const { return used_; }

 private:
  float* at_;
  int64_t used_ = 0;
};

// Floats that a `Layout(Arena&, arguments...)` takes.
template <class Layout, class... Arguments>
static int64_t floats_of(const Arguments&... arguments) {
  Arena dry(nullptr);
  Layout(dry, arguments...);
  return dry.used();
}
