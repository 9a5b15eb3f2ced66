#include "core/teacher/lanes.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace graft {
namespace {

// Each lane holds activations of its own.
constexpr std::int64_t kMostLanes = 8;

// Hands out pieces in order until one fails.
class Pieces {
 public:
  explicit Pieces(std::int64_t count) : count_(count) {}

  bool next(std::int64_t& piece) {
    const std::lock_guard lock(mutex_);
    if (error_ || next_ == count_) return false;
    piece = next_++;
    return true;
  }

  void failed(std::int64_t piece, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_ || piece < failed_) error_ = std::move(error), failed_ = piece;
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  const std::int64_t count_;
  std::int64_t next_ = 0, failed_ = 0;
  std::exception_ptr error_;
};

}  // namespace

std::int64_t lanes(std::int64_t pieces) {
  return std::clamp<std::int64_t>(at::get_num_threads(), 1,
                                  std::clamp<std::int64_t>(pieces, 1, kMostLanes));
}

void in_lanes(std::int64_t pieces,
              const std::function<void(std::int64_t piece, std::int64_t lane)>& work,
              std::int64_t like) {
  const std::int64_t count = lanes(std::max(pieces, like));
  if (count == 1) {
    for (std::int64_t piece = 0; piece < pieces; ++piece) work(piece, 0);
    return;
  }
  const int threads = at::get_num_threads();
  const int each = std::max(1, threads / static_cast<int>(count));
  const at::ThreadLocalState state;
  Pieces todo(pieces);
  const auto run = [&](std::int64_t lane) {
    const at::ThreadLocalStateGuard guard(state);
    at::set_num_threads(each);
    for (std::int64_t piece = 0; todo.next(piece);) {
      try {
        work(piece, lane);
      } catch (...) {
        todo.failed(piece, std::current_exception());
      }
    }
  };
  {
    std::vector<std::jthread> threads_of_lanes;
    for (std::int64_t lane = 0; lane < std::min(count, pieces); ++lane)
      threads_of_lanes.emplace_back(run, lane);
  }
  at::set_num_threads(threads);  // part of it is of the process
  todo.rethrow();
}

}  // namespace graft
