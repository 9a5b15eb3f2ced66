// Runs kernels on the host, block after block and, within a phase, thread after thread, in an order
// that can be chosen; and checks what a device would not forgive: a number of shared memory read
// before it is written, read and written by two threads in one phase (a barrier is missing),
// outside of the block's memory, or as a pack that does not lie at a multiple of its size. Throws
// std::logic_error that names the kernel's thread, place and phase.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "block.h"

namespace graft::cuda {

enum class Order { kForward, kReverse, kShuffled };

class SharedMemory {
 public:
  explicit SharedMemory(int floats)
      : numbers_(static_cast<std::size_t>(floats)), marks_(numbers_.size()) {}

  void start_block() {
    std::fill(marks_.begin(), marks_.end(), Mark{});
    phase_ = 0;
  }
  void start_phase() { ++phase_; }
  void start_thread(int thread) { thread_ = thread; }

  template <int N>
  Pack<N> read(int at) {
    check_place(at, N, "reads");
    Pack<N> out;
    for (int i = 0; i < N; ++i) {
      Mark& mark = marks_[static_cast<std::size_t>(at + i)];
      if (mark.written == 0) fail("reads", at + i, "which nobody wrote");
      if (mark.written == phase_ && mark.writer != thread_)
        fail_race("reads", at + i, mark.writer, "wrote");
      mark.reader = mark.read == phase_ && mark.reader != thread_ ? kSeveral : thread_;
      mark.read = phase_;
      out.at[i] = numbers_[static_cast<std::size_t>(at + i)];
    }
    return out;
  }
  template <int N>
  void write(int at, const Pack<N>& x) {
    check_place(at, N, "writes");
    for (int i = 0; i < N; ++i) {
      Mark& mark = marks_[static_cast<std::size_t>(at + i)];
      if (mark.written == phase_ && mark.writer != thread_)
        fail_race("writes", at + i, mark.writer, "wrote");
      if (mark.read == phase_ && mark.reader != thread_)
        fail_race("writes", at + i, mark.reader, "read");
      mark.writer = thread_;
      mark.written = phase_;
      numbers_[static_cast<std::size_t>(at + i)] = x.at[i];
    }
  }

 private:
  static constexpr int kSeveral = -1;
  struct Mark {
    int written = 0, writer = 0, read = 0, reader = 0;  // phases, from 1 on, and threads
  };

  void check_place(int at, int n, const char* does) const {
    if (at < 0 || at + n > static_cast<int>(numbers_.size()))
      fail(does, at, "outside of the " + std::to_string(numbers_.size()) + " that the block has");
    if (at % n != 0) fail(does, at, "as a pack of " + std::to_string(n) + " that is not aligned");
  }
  [[noreturn]] void fail_race(const char* does, int at, int other, const char* did) const {
    fail(does, at,
         "which " + (other == kSeveral ? "several threads" : "thread " + std::to_string(other)) +
             " " + did + " in the same phase");
  }
  [[noreturn]] void fail(const char* does, int at, const std::string& why) const {
    throw std::logic_error("phase " + std::to_string(phase_) + ": thread " +
                           std::to_string(thread_) + " " + does + " float " + std::to_string(at) +
                           " of shared memory, " + why);
  }

  std::vector<float> numbers_;
  std::vector<Mark> marks_;
  int phase_ = 0, thread_ = 0;
};

class HostBlock {
 public:
  struct Memory {
    SharedMemory* shared;
    template <int N>
    Pack<N> read(int at) const {
      return shared->read<N>(at);
    }
    template <int N>
    void write(int at, const Pack<N>& x) const {
      shared->write<N>(at, x);
    }
  };

  template <class T>
  class PerThread {
   public:
    explicit PerThread(HostBlock&) : all_(kThreads) {}
    T& operator[](int thread) { return all_[static_cast<std::size_t>(thread)]; }

   private:
    std::vector<T> all_;
  };

  HostBlock(SharedMemory& shared, const std::vector<int>& threads, Grid at)
      : shared_(shared), threads_(threads), at_(at) {
    shared_.start_block();
  }
  template <class F>
  void phase(const F& f) {
    shared_.start_phase();
    for (int thread : threads_) {
      shared_.start_thread(thread);
      f(thread);
    }
  }
  int x() const { return at_.x; }
  int y() const { return at_.y; }
  int z() const { return at_.z; }
  Memory memory() const { return {&shared_}; }

 private:
  SharedMemory& shared_;
  const std::vector<int>& threads_;
  Grid at_;
};

// A `launch` of the kernels' lists. Every launch gets its own order of blocks and of threads.
class HostLaunch {
 public:
  HostLaunch(int shared_bytes, Order order) : shared_bytes_(shared_bytes), order_(order) {}

  template <class Kernel>
  void operator()(const Kernel& kernel) {
    const int bytes = kernel.shared() * static_cast<int>(sizeof(float));
    if (bytes > shared_bytes_)
      throw std::logic_error("a block wants " + std::to_string(bytes) +
                             " bytes of shared memory; the device has " +
                             std::to_string(shared_bytes_));
    most_shared_ = std::max(most_shared_, bytes);
    SharedMemory shared(kernel.shared());
    const Grid grid = kernel.grid();
    const std::vector<int> threads = ordered(kThreads);
    for (int at : ordered(grid.x * grid.y * grid.z)) {
      HostBlock block(shared, threads, {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y});
      kernel(block);
    }
  }
  int most_shared() const { return most_shared_; }  // bytes

 private:
  std::vector<int> ordered(int n) {
    std::vector<int> out(static_cast<std::size_t>(n));
    std::iota(out.begin(), out.end(), 0);
    if (order_ == Order::kReverse) std::reverse(out.begin(), out.end());
    if (order_ == Order::kShuffled) std::shuffle(out.begin(), out.end(), random_);
    return out;
  }

  int shared_bytes_;
  Order order_;
  int most_shared_ = 0;
  std::mt19937 random_{20};
};

}  // namespace graft::cuda
