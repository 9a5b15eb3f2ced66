// One thread at a time per instance: instances side by side, and one that moves.
#include <exception>
#include <memory>
#include <thread>

#include "kit/checks.h"
#include "kit/mixer.h"

namespace graft::conformance {
namespace {

constexpr std::int64_t kShort = 33, kLong = 70;

struct Pass {
  MixerOutputs out;
  Gradients gradients;  // none without GRAFT_CAP_BACKWARD
};

// Forward, and backward where there is one.
Pass run(const Context& context, Mixer& mixer, const MixerInputs& in) {
  Pass pass;
  pass.out = mixer.forward(in);
  if (!context.has(GRAFT_CAP_BACKWARD)) return pass;
  Random random(context.seed + 7);
  Cotangents from;
  from.dy = Tensor(in.x.dtype(), in.x.shape(), random.normals(in.x.size()));
  pass.gradients = mixer.backward(in, pass.out, from);
  return pass;
}

MixerInputs inputs(const Context& context, const Mixer& mixer, std::int64_t batch,
                   std::int64_t tokens, std::uint64_t seed) {
  Random random(seed);
  MixerInputs in = mixer.random_inputs(batch, tokens, exact_dtype(context), random);
  if (context.has(GRAFT_CAP_BACKWARD)) in.flags |= GRAFT_X_TRAINING;
  if (context.has(GRAFT_CAP_DETERMINISTIC)) in.flags |= GRAFT_X_DETERMINISTIC;
  return in;
}

void compare(const Context& context, const Tensor& got, const Tensor& expected,
             const std::string& what) {
  if (!got.there()) return;
  if (context.has(GRAFT_CAP_DETERMINISTIC)) return check_equal(got, expected, what);
  check_close(got, expected, context.tolerance * gradient_tolerance(expected.dtype(), kLong), what);
}

void compare(const Context& context, const Pass& got, const Pass& expected,
             const std::string& where) {
  compare(context, got.out.y, expected.out.y, "y " + where);
  for (std::size_t i = 0; i < got.out.state.size(); ++i)
    compare(context, got.out.state[i], expected.out.state[i], sdk::cat("state ", i, " ", where));
  compare(context, got.gradients.dx, expected.gradients.dx, "dx " + where);
  for (std::size_t i = 0; i < got.gradients.dparams.size(); ++i)
    compare(context, got.gradients.dparams[i], expected.gradients.dparams[i],
            sdk::cat("dparams ", i, " ", where));
}

// Runs `work` on a thread of its own; what it throws is thrown when it is joined.
class Worker {
 public:
  template <class Work>
  explicit Worker(Work work)
      : thread_([this, work] {
          try {
            work();
          } catch (...) {
            problem_ = std::current_exception();
          }
        }) {}
  void join() {
    thread_.join();
    if (problem_) std::rethrow_exception(problem_);
  }

 private:
  std::exception_ptr problem_;  // before the thread that may set it
  std::thread thread_;
};

void two_instances(Context& context) {
  Mixer first(context), second(context);
  const MixerInputs in_first = inputs(context, first, 2, kShort, context.seed),
                    in_second = inputs(context, second, 1, kLong, context.seed + 1);
  const Pass alone_first = run(context, first, in_first),
             alone_second = run(context, second, in_second);
  constexpr int kRounds = 40;
  const auto repeat = [&](Mixer& mixer, const MixerInputs& in, const Pass& alone) {
    for (int i = 0; i < kRounds; ++i)
      compare(context, run(context, mixer, in), alone, "beside another instance's");
  };
  Worker one([&] { repeat(first, in_first, alone_first); });
  Worker other([&] { repeat(second, in_second, alone_second); });
  // Both ends are waited for before either's problem is told.
  std::exception_ptr problem;
  for (Worker* const worker : {&one, &other}) {
    try {
      worker->join();
    } catch (...) {
      problem = std::current_exception();
    }
  }
  if (problem) std::rethrow_exception(problem);
}

void moved(Context& context) {
  Mixer mixer(context);
  const MixerInputs in = inputs(context, mixer, 2, kShort, context.seed);
  const Pass here = run(context, mixer, in);
  for (int i = 0; i < 3; ++i) {
    Worker elsewhere([&] { compare(context, run(context, mixer, in), here, "on another thread"); });
    elsewhere.join();
    compare(context, run(context, mixer, in), here, "back on the first thread");
  }
  // Made elsewhere, and destroyed here.
  std::unique_ptr<Mixer> foreign;
  Worker maker([&] { foreign = std::make_unique<Mixer>(context); });
  maker.join();
  compare(context, run(context, *foreign, in), here, "of an instance made on another thread");
}

}  // namespace

std::vector<Test> concurrency_tests() {
  return {
      {"concurrency.two_instances", Kind::mixer,
       "Two instances on two threads give what each gives alone.", two_instances},
      {"concurrency.moved", Kind::mixer,
       "An instance can be called from one thread and then from another.", moved},
  };
}

}  // namespace graft::conformance
