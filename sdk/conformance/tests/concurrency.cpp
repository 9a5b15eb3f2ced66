// Instances are independent, and of no thread in particular.
#include <exception>
#include <thread>

#include "kit/checks.h"
#include "kit/mixer.h"

namespace graft::conformance {
namespace {

constexpr int kRounds = 12;

struct Work {
  Work(Context& context, std::int64_t tokens, std::uint64_t seed) : mixer(context), random(seed) {
    in = mixer.random_inputs(2, tokens, exact_dtype(context), random);
    if (context.has(GRAFT_CAP_BACKWARD)) in.flags = GRAFT_X_TRAINING;
    from.dy = Tensor(in.x.dtype(), in.x.shape(), random.normals(in.x.size()));
    expected = mixer.forward(in);
    if (in.flags != 0) gradients = mixer.backward(in, expected, from);
  }

  void run() {
    const MixerOutputs out = mixer.forward(in);
    check_close(out.y, expected.y, tolerance(in.x.dtype(), in.tokens()), "y beside another thread");
    if (in.flags == 0) return;
    check_close(mixer.backward(in, out, from).dx, gradients.dx,
                gradient_tolerance(in.x.dtype(), in.tokens()), "dx beside another thread");
  }

  Mixer mixer;
  Random random;
  MixerInputs in;
  Cotangents from;
  MixerOutputs expected;
  Gradients gradients;
};

// Runs `body` on a thread; what it throws comes back.
class Thread {
 public:
  template <class Body>
  explicit Thread(Body body)
      : thread_([this, body] {
          try {
            body();
          } catch (...) {
            problem_ = std::current_exception();
          }
        }) {}
  void join() {
    thread_.join();
    if (problem_) std::rethrow_exception(problem_);
  }

 private:
  std::exception_ptr problem_;
  std::thread thread_;
};

void two_instances(Context& context) {
  Work one(context, 41, context.seed), other(context, 66, context.seed + 1);
  const auto many = [](Work& work) {
    for (int n = 0; n < kRounds; ++n) work.run();
  };
  Thread first([&] { many(one); });
  Thread second([&] { many(other); });
  // Both are joined before either's failure is told.
  std::exception_ptr problem;
  for (Thread* const thread : {&first, &second}) {
    try {
      thread->join();
    } catch (...) {
      problem = std::current_exception();
    }
  }
  if (problem) std::rethrow_exception(problem);
}

void moved(Context& context) {
  Work work(context, 41, context.seed);
  for (int n = 0; n < 3; ++n) {
    Thread thread([&] { work.run(); });
    thread.join();
    work.run();
  }
}

}  // namespace

std::vector<Test> concurrency_tests() {
  return {
      {"concurrency.two_instances", Kind::mixer,
       "Two instances on two threads give what each gives alone.", two_instances},
      {"concurrency.moved", Kind::mixer, "An instance works on whatever thread calls it.", moved},
  };
}

}  // namespace graft::conformance
