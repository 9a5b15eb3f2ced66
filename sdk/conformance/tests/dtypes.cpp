// The smaller types against the most exact one of the same plugin.
#include "kit/checks.h"
#include "kit/mixer.h"

namespace graft::conformance {
namespace {

constexpr std::int64_t kTokens = 65;

// `exact` with x and parameters as they are after rounding to `in`'s types.
MixerInputs same_values(const MixerInputs& in, DLDataType exact) {
  MixerInputs out;
  out.x = Tensor(exact, in.x.shape(), in.x.values());
  const bool wide = sdk::same_dtype(exact, sdk::float64);
  for (const Tensor& param : in.params) {
    out.params.emplace_back(wide ? sdk::float64 : sdk::float32, param.shape(), param.values());
  }
  out.flags = in.flags;
  return out;
}

void compare(Context& context, const Tensor& got, const Tensor& expected, double allowed,
             const std::string& what) {
  const std::vector<double> values = got.values(), wanted = expected.values();
  const Deviation d = deviation(values, wanted);
  context.note(what, ": mean error ", d.mean, ", largest ", d.largest, " of the largest (", allowed,
               " allowed)");
  const std::string problem = not_close(values, wanted, allowed);
  if (!problem.empty()) fail(what, ": ", problem);
  if (d.mean > kMeanShare * allowed) {
    fail(what, ": off by ", d.mean, " of the largest element in the mean, ", kMeanShare * allowed,
         " allowed");
  }
}

void check_dtype(Context& context, DLDataType dtype) {
  const std::string name = sdk::dtype_name(dtype);
  if (!offers(context, dtype)) skip("does not compute in ", name);
  const DLDataType exact = exact_dtype(context);
  if (sdk::same_dtype(exact, dtype)) skip("computes in nothing more exact than ", name);
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(2, kTokens, dtype, random);
  const bool trains = context.has(GRAFT_CAP_BACKWARD);
  if (trains) in.flags = GRAFT_X_TRAINING;
  const MixerInputs reference = same_values(in, exact);
  const MixerOutputs out = mixer.forward(in), expected = mixer.forward(reference);
  const double allowed = context.tolerance * tolerance(dtype, kTokens);
  compare(context, out.y, expected.y, allowed, "y in " + name);
  for (std::size_t i = 0; i < out.state.size(); ++i) {
    compare(context, out.state[i], expected.state[i], allowed, sdk::cat("state ", i, " in ", name));
  }
  if (!trains) return;
  Cotangents from, reference_from;
  from.dy = Tensor(dtype, in.x.shape(), random.normals(in.x.size()));
  reference_from.dy = Tensor(exact, in.x.shape(), from.dy.values());
  const Gradients got = mixer.backward(in, mixer.forward(in), from);
  const Gradients wanted = mixer.backward(reference, mixer.forward(reference), reference_from);
  const double gradient_allowed = context.tolerance * gradient_tolerance(dtype, kTokens);
  compare(context, got.dx, wanted.dx, gradient_allowed, "dx in " + name);
  for (std::size_t i = 0; i < got.dparams.size(); ++i) {
    if (!got.dparams[i].there()) continue;
    compare(context, got.dparams[i], wanted.dparams[i], gradient_allowed,
            sdk::cat("the gradient of '", mixer.specs()[i]->name, "' in ", name));
  }
}

void float_32(Context& context) { check_dtype(context, sdk::float32); }
void bfloat_16(Context& context) { check_dtype(context, sdk::bfloat16); }
void float_16(Context& context) { check_dtype(context, sdk::float16); }

}  // namespace

std::vector<Test> dtype_tests() {
  return {
      {"dtype.float32", Kind::mixer, "float32 is float64 up to its rounding, gradients too.",
       float_32},
      {"dtype.bfloat16", Kind::mixer,
       "bfloat16 inputs give what their values give in full precision, up to bfloat16's rounding.",
       bfloat_16},
      {"dtype.float16", Kind::mixer,
       "float16 inputs give what their values give in full precision, up to float16's rounding.",
       float_16},
  };
}

}  // namespace graft::conformance
