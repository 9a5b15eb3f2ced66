// What holds of an objective: its gradient is that of its loss, and a token that does not count
// does not show.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <set>

#include "kit/checks.h"
#include "kit/mixer.h"
#include "kit/names.h"
#include "kit/objective.h"

namespace graft::conformance {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinite = std::numeric_limits<double>::infinity();

// body(objective, "with <option> = <value>") for the defaults and each other choice that an option
// offers. Skips where nothing could be tried.
template <class Body>
void for_each_configuration(Context& context, Body&& body) {
  std::string skipped;
  int tried = 0;
  for (const NamedOptions& one : configurations(context.desc(), context.options)) {
    try {
      Objective objective(context, one.options);
      body(objective);
      ++tried;
    } catch (const Skipped& why) {
      skipped = why.what();
    } catch (const Failed& problem) {
      // Choices need not go together with the defaults of the others.
      const bool refused = std::string_view(problem.what()).starts_with("create answers");
      if (!refused || one.name == "the defaults") fail("with ", one.name, ": ", problem.what());
      context.note("with ", one.name, ": ", problem.what());
    }
  }
  if (tried == 0) skip(skipped);
}

// Every output was written, and is a number.
void check_complete(const Objective& objective, const ObjectiveOutputs& out,
                    std::string_view what) {
  if (!std::isfinite(out.loss)) fail(what, ": the loss is ", out.loss);
  for (std::size_t i = 0; i < out.grads.size(); ++i)
    check_finite(out.grads[i], sdk::cat(what, ", the gradient of ", objective.name(i)));
}

void check_loss(double got, double expected, double allowed, std::string_view what) {
  if (std::fabs(got - expected) <= allowed * std::max(1.0, std::fabs(expected))) return;
  fail(what, ": the loss is ", got, ", expected ", expected, " (", allowed, " allowed)");
}

void check_grads(const Objective& objective, const ObjectiveOutputs& got,
                 const ObjectiveOutputs& expected, double allowed, std::string_view what) {
  for (std::size_t i = 0; i < expected.grads.size(); ++i) {
    if (!expected.grads[i].there()) continue;
    check_close(got.grads[i], expected.grads[i], allowed,
                sdk::cat(what, ", the gradient of ", objective.name(i)));
  }
}

void check_same(const Objective& objective, const ObjectiveOutputs& got,
                const ObjectiveOutputs& expected, std::string_view what) {
  if (got.loss != expected.loss)
    fail(what, ": the loss is ", got.loss, ", expected ", expected.loss, " to the bit");
  for (std::size_t i = 0; i < expected.grads.size(); ++i) {
    if (expected.grads[i].there())
      check_equal(got.grads[i], expected.grads[i],
                  sdk::cat(what, ", the gradient of ", objective.name(i)));
  }
}

std::int64_t per_token(const Tensor& signal, const BatchSize& size) {
  return signal.size() / size.all();
}

// What a token holds, in every signal but the mask.
void set_token(const Objective& objective, ObjectiveInputs& in, const BatchSize& size,
               std::int64_t token, double value, double label) {
  for (std::size_t s = 0; s < in.signals.size(); ++s) {
    Tensor& signal = in.signals[s];
    if (!signal.there() || objective.name(s) == GRAFT_SIGNAL_LOSS_MASK) continue;
    const std::int64_t n = per_token(signal, size);
    for (std::int64_t i = token * n; i < (token + 1) * n; ++i)
      signal.set(i, signal.floating() ? value : label);
  }
}

Tensor& mask_of(const Objective& objective, ObjectiveInputs& in) {
  return in.signals[static_cast<std::size_t>(objective.find(GRAFT_SIGNAL_LOSS_MASK))];
}
Tensor& weight_of(const Objective& objective, ObjectiveInputs& in) {
  return in.signals[static_cast<std::size_t>(objective.find(GRAFT_SIGNAL_TOKEN_WEIGHT))];
}

void need_mask(const Objective& objective) {
  if (!objective.takes(GRAFT_SIGNAL_LOSS_MASK)) skip("takes no " GRAFT_SIGNAL_LOSS_MASK);
}
void need_weight(const Objective& objective) {
  if (!objective.takes(GRAFT_SIGNAL_TOKEN_WEIGHT)) skip("takes no " GRAFT_SIGNAL_TOKEN_WEIGHT);
}

std::vector<std::int64_t> range(std::int64_t from, std::int64_t to) {
  std::vector<std::int64_t> out(static_cast<std::size_t>(to - from));
  std::iota(out.begin(), out.end(), from);
  return out;
}

// ---------------------------------------------------------------- tables

void needs(Context& context) {
  for_each_configuration(context, [](const Objective& objective) {
    std::set<std::string> names;
    bool any_gradient = false;
    for (const graft_signal_need& need : objective.needs()) {
      const std::string problem = objective_signal_problem(need.name);
      if (!problem.empty()) fail("needs: ", problem);
      if (!names.insert(need.name).second) fail("needs: names ", need.name, " twice");
      if ((need.flags & ~std::uint32_t{GRAFT_NEED_REQUIRED | GRAFT_NEED_GRAD}) != 0)
        fail("needs: ", need.name, " has bits set that mean nothing for a signal");
      any_gradient = any_gradient || (need.flags & GRAFT_NEED_GRAD) != 0;
    }
    if (!any_gradient) fail("needs: gives a gradient to no signal: nothing can be trained on it");
  });
}

// ---------------------------------------------------------------- gradients

// d loss / d signal[i] by central differences of two steps.
double difference(Objective& objective, ObjectiveInputs& in, std::size_t signal, std::int64_t i) {
  Tensor& x = in.signals[signal];
  const double at = x.at(i);
  const auto slope = [&](double h) {
    x.set(i, at + h);
    const double high = x.at(i), loss_high = objective.run(in).loss;
    x.set(i, at - h);
    const double low = x.at(i), loss_low = objective.run(in).loss;
    return (loss_high - loss_low) / (high - low);
  };
  const double wide = slope(kLossDifferenceStep), narrow = slope(kLossDifferenceStep / 2);
  x.set(i, at);
  return (4 * narrow - wide) / 3;
}

void check_gradient(Context& context, Objective& objective, ObjectiveInputs in,
                    const std::string& what) {
  const ObjectiveOutputs out = objective.run(in);
  check_complete(objective, out, what);
  in.grads = ObjectiveInputs::Grads::none;
  for (std::size_t s = 0; s < in.signals.size(); ++s) {
    if (!out.grads[s].there()) continue;
    const std::vector<double> got = out.grads[s].values();
    double largest = 0;
    for (const double g : got) largest = std::max(largest, std::fabs(g));
    const double allowed =
        context.tolerance * (kLossDifferenceTolerance * largest + loss_rounding(out.loss));
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double expected = difference(objective, in, s, static_cast<std::int64_t>(i));
      if (std::fabs(got[i] - expected) <= allowed) continue;
      fail(what, ", the gradient of ", objective.name(s), ": element ", i, " is ", got[i],
           ", differences of the loss give ", expected, " (", allowed, " allowed)");
    }
  }
}

void gradient(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  for_each_configuration(context, [&](Objective& objective) {
    Random random(context.seed);
    const BatchSize size;
    check_gradient(context, objective, objective.random_inputs(size, dtype, random),
                   "required signals");
    ObjectiveInputs in = objective.random_inputs(
        size, dtype, random, {GRAFT_SIGNAL_LOSS_MASK, GRAFT_SIGNAL_TOKEN_WEIGHT});
    if (objective.takes(GRAFT_SIGNAL_LOSS_MASK)) mask_of(objective, in).set(1, 0);
    check_gradient(context, objective, std::move(in), "with mask and weights");
  });
}

void grad_scale(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  for_each_configuration(context, [&](Objective& objective) {
    Random random(context.seed);
    ObjectiveInputs in = objective.random_inputs({}, dtype, random);
    const ObjectiveOutputs one = objective.run(in);
    for (const double scale : {0.0, 0.5, -3.0, 1024.0}) {
      in.grad_scale = scale;
      const ObjectiveOutputs scaled = objective.run(in);
      const std::string what = sdk::cat("with grad_scale ", scale);
      check_loss(scaled.loss, one.loss, 0, what);
      for (std::size_t i = 0; i < one.grads.size(); ++i) {
        if (!one.grads[i].there()) continue;
        std::vector<double> expected = one.grads[i].values();
        for (double& g : expected) g *= scale;
        const std::string problem =
            not_close(scaled.grads[i].values(), expected, context.tolerance * kLossTolerance);
        if (!problem.empty()) fail(what, ", the gradient of ", objective.name(i), ": ", problem);
      }
    }
  });
}

// ---------------------------------------------------------------- tokens that do not count

void mask(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  for_each_configuration(context, [&](Objective& objective) {
    need_mask(objective);
    Random random(context.seed);
    const BatchSize size{2, 4, 7};
    ObjectiveInputs in = objective.random_inputs(
        size, dtype, random, {GRAFT_SIGNAL_LOSS_MASK, GRAFT_SIGNAL_TOKEN_WEIGHT});
    const std::vector<std::int64_t> masked{0, 3, 6};
    for (const std::int64_t token : masked) mask_of(objective, in).set(token, 0);
    const ObjectiveOutputs expected = objective.run(in);
    check_complete(objective, expected, "with tokens masked");
    for (const double value : {1e4, kInfinite, kNaN}) {
      for (const std::int64_t token : masked) set_token(objective, in, size, token, value, 1e9);
      const std::string what = sdk::cat("masked tokens that hold ", value);
      const ObjectiveOutputs out = objective.run(in);
      check_same(objective, out, expected, what);
      for (std::size_t s = 0; s < out.grads.size(); ++s) {
        const Tensor& grad = out.grads[s];
        if (!grad.there()) continue;
        const std::int64_t n = per_token(grad, size);
        for (const std::int64_t token : masked) {
          for (std::int64_t i = token * n; i < (token + 1) * n; ++i) {
            if (grad.at(i) != 0)
              fail(what, ": the gradient of ", objective.name(s), " at token ", token, " is ",
                   grad.at(i), "; expected 0");
          }
        }
      }
    }
  });
}

void padding(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  for_each_configuration(context, [&](Objective& objective) {
    need_mask(objective);
    Random random(context.seed);
    const BatchSize padded{3, 5, 7};
    ObjectiveInputs in = objective.random_inputs(padded, dtype, random, {GRAFT_SIGNAL_LOSS_MASK});
    std::vector<std::int64_t> real;
    for (std::int64_t token = 0; token < padded.all(); ++token) {
      // Two rows, padded on the right and on the left, and one of padding alone.
      const std::int64_t row = token / 5, t = token % 5;
      const bool pad = row == 2 || (row == 0 && t >= 3) || (row == 1 && t < 2);
      mask_of(objective, in).set(token, pad ? 0 : 1);
      if (pad) set_token(objective, in, padded, token, kNaN, -1);
      if (!pad) real.push_back(token);
    }
    const ObjectiveOutputs with = objective.run(in);
    ObjectiveInputs bare = objective.tokens_of(in, padded, real);
    const auto mask = static_cast<std::size_t>(objective.find(GRAFT_SIGNAL_LOSS_MASK));
    if ((objective.needs()[mask].flags & GRAFT_NEED_REQUIRED) == 0)
      mask_of(objective, bare) = Tensor();
    const ObjectiveOutputs without = objective.run(bare);
    const double allowed = context.tolerance * kLossTolerance;
    check_loss(with.loss, without.loss, allowed, "with padding, against none");
    ObjectiveInputs grads;
    for (const Tensor& grad : with.grads) grads.signals.push_back(grad.copy());
    ObjectiveOutputs of_real;
    of_real.grads = objective.tokens_of(grads, padded, real).signals;
    check_grads(objective, of_real, without, allowed, "with padding, against none");
  });
}

void split(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Objective objective(context);
  Random random(context.seed);
  const BatchSize size{2, 5, 7};
  ObjectiveInputs in = objective.random_inputs(size, dtype, random,
                                               {GRAFT_SIGNAL_LOSS_MASK, GRAFT_SIGNAL_TOKEN_WEIGHT});
  if (objective.takes(GRAFT_SIGNAL_LOSS_MASK)) mask_of(objective, in).set(4, 0);
  const ObjectiveOutputs whole = objective.run(in);
  double loss = 0, weight = 0;
  std::vector<ObjectiveOutputs> parts;
  const std::int64_t cut = 3;
  for (const auto& tokens : {range(0, cut), range(cut, size.all())}) {
    ObjectiveOutputs& part =
        parts.emplace_back(objective.run(objective.tokens_of(in, size, tokens)));
    const auto reported = part.metrics.find(GRAFT_METRIC_WEIGHT);
    if (reported == part.metrics.end())
      fail("does not report the metric '" GRAFT_METRIC_WEIGHT
           "', by which a host puts the parts of a batch together");
    loss += reported->second * part.loss;
    weight += reported->second;
  }
  const double allowed = context.tolerance * kLossTolerance;
  check_loss(loss / weight, whole.loss, allowed, "in two parts, against the whole");
  check_loss(weight, whole.metrics.at(GRAFT_METRIC_WEIGHT), allowed,
             "the weight of two parts, against the whole's");
  for (std::size_t s = 0; s < whole.grads.size(); ++s) {
    if (!whole.grads[s].there()) continue;
    std::vector<double> joined;
    for (const ObjectiveOutputs& part : parts) {
      for (const double g : part.grads[s].values())
        joined.push_back(g * part.metrics.at(GRAFT_METRIC_WEIGHT) / weight);
    }
    const std::string problem = not_close(joined, whole.grads[s].values(), allowed);
    if (!problem.empty())
      fail("in two parts, against the whole, the gradient of ", objective.name(s), ": ", problem);
  }
}

// Equal weights are none, a weight of 0 masks, and of their scale nothing is left.
void token_weight(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  for_each_configuration(context, [&](Objective& objective) {
    need_weight(objective);
    Random random(context.seed);
    const BatchSize size{2, 4, 7};
    const double allowed = context.tolerance * kLossTolerance;
    ObjectiveInputs in = objective.random_inputs(size, dtype, random, {GRAFT_SIGNAL_TOKEN_WEIGHT});
    const ObjectiveOutputs weighted = objective.run(in);
    Tensor& weight = weight_of(objective, in);
    const std::vector<double> weights = weight.values();
    for (std::int64_t i = 0; i < weight.size(); ++i) weight.set(i, 4 * weight.at(i));
    const ObjectiveOutputs larger = objective.run(in);
    check_loss(larger.loss, weighted.loss, allowed, "with four times the weights");
    check_grads(objective, larger, weighted, allowed, "with four times the weights");

    weight.set(weights);
    weight.set(2, 0);
    const ObjectiveOutputs zero = objective.run(in);
    set_token(objective, in, size, 2, kNaN, -1);
    weight_of(objective, in).set(2, 0);
    check_same(objective, objective.run(in), zero, "a token of weight 0 that holds NaN");

    ObjectiveInputs equal =
        objective.random_inputs(size, dtype, random, {GRAFT_SIGNAL_TOKEN_WEIGHT});
    weight_of(objective, equal).fill(1);
    const ObjectiveOutputs ones = objective.run(equal);
    const auto at = static_cast<std::size_t>(objective.find(GRAFT_SIGNAL_TOKEN_WEIGHT));
    if ((objective.needs()[at].flags & GRAFT_NEED_REQUIRED) != 0) return;
    equal.signals[at] = Tensor();
    const ObjectiveOutputs none = objective.run(equal);
    check_loss(ones.loss, none.loss, allowed, "with weights of 1, against none");
    check_grads(objective, ones, none, allowed, "with weights of 1, against none");
  });
}

// No mask bit, or no token at all.
void empty(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  for_each_configuration(context, [&](Objective& objective) {
    Random random(context.seed);
    for (const BatchSize& size : {BatchSize{1, 0, 7}, BatchSize{0, 3, 7}})
      check_complete(objective, objective.run(objective.random_inputs(size, dtype, random)),
                     sdk::cat("of ", size.batch, " x ", size.tokens, " tokens"));
    for (const char* const by : {GRAFT_SIGNAL_LOSS_MASK, GRAFT_SIGNAL_TOKEN_WEIGHT}) {
      if (!objective.takes(by)) continue;
      ObjectiveInputs in = objective.random_inputs({}, dtype, random, {by});
      in.signals[static_cast<std::size_t>(objective.find(by))].fill(0);
      const ObjectiveOutputs out = objective.run(in);
      const std::string what = sdk::cat("with a ", by, " of zeros");
      check_complete(objective, out, what);
      if (out.loss != 0) fail(what, ": the loss is ", out.loss, "; expected 0");
      for (std::size_t s = 0; s < out.grads.size(); ++s) {
        if (!out.grads[s].there()) continue;
        const std::vector<double> values = out.grads[s].values();
        if (std::ranges::any_of(values, [](double g) { return g != 0; }))
          fail(what, ": the gradient of ", objective.name(s), " is not 0");
      }
    }
  });
}

// ---------------------------------------------------------------- values

// "teacher.logits" for "student.logits"; -1 where there is none.
int counterpart(const Objective& objective, std::size_t signal) {
  const std::string name = objective.name(signal);
  if (!name.starts_with("student.")) return -1;
  return objective.find("teacher." + name.substr(8));
}

void zero_at_equality(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  for_each_configuration(context, [&](Objective& objective) {
    Random random(context.seed);
    ObjectiveInputs in = objective.random_inputs({}, dtype, random);
    bool any = false;
    for (std::size_t s = 0; s < in.signals.size(); ++s) {
      const int teacher = counterpart(objective, s);
      if (teacher < 0 || !in.signals[s].there()) continue;
      in.signals[static_cast<std::size_t>(teacher)] = in.signals[s].copy();
      any = true;
    }
    if (!any) skip("compares no signal of the student with the teacher's");
    const ObjectiveOutputs out = objective.run(in);
    const double allowed = context.tolerance * kLossTolerance;
    check_loss(out.loss, 0, allowed, "with the student equal to the teacher");
    for (std::size_t s = 0; s < out.grads.size(); ++s) {
      if (!out.grads[s].there()) continue;
      for (const double g : out.grads[s].values()) {
        if (!(std::fabs(g) <= allowed))
          fail("with the student equal to the teacher, the gradient of ", objective.name(s),
               " has an entry of ", g, "; expected 0 (", allowed, " allowed)");
      }
    }
  });
}

// Finite, or refused in words.
void check_large(Objective& objective, const ObjectiveInputs& in, const std::string& what) {
  ObjectiveOutputs out;
  const Outcome outcome = objective.try_run(in, &out);
  if (outcome.ok()) return check_complete(objective, out, what);
  if (outcome.message.empty()) fail(what, ": is refused without a message");
}

void large_values(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  for_each_configuration(context, [&](Objective& objective) {
    Random random(context.seed);
    ObjectiveInputs in = objective.random_inputs({2, 5, 9}, dtype, random);
    for (Tensor& signal : in.signals) {
      if (!signal.there() || !signal.floating()) continue;
      for (std::int64_t i = 0; i < signal.size(); ++i)
        signal.set(i, random.unit() < 0.5 ? -1e4 : 1e4);
    }
    check_large(objective, in, "signals of +-1e4");
    const int teacher = objective.find(GRAFT_SIGNAL_TEACHER_LOGITS);
    if (teacher < 0) return;
    Tensor& logits = in.signals[static_cast<std::size_t>(teacher)];
    for (std::int64_t i = 0; i < logits.size(); ++i)
      logits.set(i, i % 9 < 4 ? -kInfinite : random.normal());
    check_large(objective, in, "teacher logits of -inf");
    logits.fill(-kInfinite);
    check_large(objective, in, "teacher logits that are all -inf");
  });
}

void sizes(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Objective objective(context);
  Random random(context.seed);
  for (const BatchSize& size :
       {BatchSize{1, 1, 1}, BatchSize{1, 1, 5}, BatchSize{3, 1, 33}, BatchSize{1, 17, 1},
        BatchSize{2, 2, 1025}, BatchSize{3, 43, 259}}) {
    check_complete(objective,
                   objective.run(objective.random_inputs(
                       size, dtype, random, {GRAFT_SIGNAL_LOSS_MASK, GRAFT_SIGNAL_TOKEN_WEIGHT})),
                   sdk::cat(size.batch, " x ", size.tokens, " tokens of width ", size.width));
  }
}

void dtypes(Context& context) {
  const DLDataType exact = exact_dtype(context);
  Objective objective(context);
  for (std::uint32_t d = 0; d < context.desc().n_dtypes; ++d) {
    const DLDataType dtype = context.desc().dtypes[d];
    Random random(context.seed);
    const ObjectiveInputs in = objective.random_inputs({2, 5, 33}, dtype, random);
    ObjectiveInputs same = in.copy();
    for (Tensor& signal : same.signals) {
      if (signal.there() && signal.floating())
        signal = Tensor(exact, signal.shape(), signal.values());
    }
    const ObjectiveOutputs got = objective.run(in), expected = objective.run(same);
    const std::string what = sdk::cat("in ", sdk::dtype_name(dtype));
    // The loss is computed from the same numbers, the gradient is rounded once.
    check_loss(got.loss, expected.loss, context.tolerance * 10 * kLossTolerance, what);
    check_grads(objective, got, expected,
                context.tolerance * std::max(10 * kLossTolerance, epsilon(dtype)), what);
  }
}

// ---------------------------------------------------------------- calls

void optional_signals(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Objective objective(context);
  Random random(context.seed);
  for (std::size_t s = 0; s < objective.needs().size(); ++s) {
    if ((objective.needs()[s].flags & GRAFT_NEED_REQUIRED) == 0) {
      check_complete(objective,
                     objective.run(objective.random_inputs(
                         {}, dtype, random,
                         {objective.name(s) == GRAFT_SIGNAL_LOSS_MASK ? GRAFT_SIGNAL_TOKEN_WEIGHT
                                                                      : GRAFT_SIGNAL_LOSS_MASK})),
                     "without the optional " + objective.name(s));
      continue;
    }
    ObjectiveInputs in = objective.random_inputs({}, dtype, random);
    in.signals[s] = Tensor();
    ObjectiveOutputs out;
    const Outcome outcome = objective.try_run(in, &out);
    if (outcome.ok()) fail("without the required ", objective.name(s), ": answers with OK");
    if ((outcome.where + outcome.message).find(objective.name(s)) == std::string::npos)
      fail("without the required ", objective.name(s),
           ": the answer does not name it: ", outcome.text());
  }
}

void workspace(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Objective objective(context);
  Random random(context.seed);
  const ObjectiveInputs in = objective.random_inputs({}, dtype, random);
  const ObjectiveOutputs expected = objective.run(in);
  Objective::Call call;
  objective.fill(call, in);
  const Outcome outcome = objective.try_call(call, 1);
  if (outcome.ok()) fail("with a workspace that is one byte short: answers with OK");
  if (outcome.message.empty()) fail("with a workspace that is one byte short: says nothing");
  check_same(objective, objective.run(in), expected, "after a refused call");
}

// A wrong call is refused in words; where a plugin takes more than it has to, `loss` is the answer.
void check_refused(Objective& objective, const ObjectiveInputs& in, std::optional<double> loss,
                   const std::string& what) {
  ObjectiveOutputs out;
  const Outcome outcome = objective.try_run(in, &out);
  if (!outcome.ok()) {
    if (outcome.message.empty() && outcome.where.empty())
      fail(what, ": is refused (status ", outcome.status, ") without a word");
    return;
  }
  if (!loss) fail(what, ": answers with OK");
  check_loss(out.loss, *loss, 10 * kLossTolerance, what + ": is taken, and misread");
}

void errors(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Objective objective(context);
  Random random(context.seed);
  const BatchSize size{1, 6, 7};
  const ObjectiveInputs right = objective.random_inputs(
      size, dtype, random, {GRAFT_SIGNAL_LOSS_MASK, GRAFT_SIGNAL_TOKEN_WEIGHT});
  const ObjectiveOutputs expected = objective.run(right);
  for (std::size_t s = 0; s < right.signals.size(); ++s) {
    if (!right.signals[s].there()) continue;
    const Tensor& signal = right.signals[s];
    const auto with = [&](Tensor other) {
      ObjectiveInputs in = right.copy();
      in.signals[s] = std::move(other);
      return in;
    };
    for (const DLDataType wrong : {sdk::int32, sdk::float32, sdk::float64}) {
      if (sdk::same_dtype(wrong, signal.dtype())) continue;
      ObjectiveInputs in = with(Tensor(wrong, signal.shape(), signal.values()));
      // The same numbers in the right type.
      const double loss =
          objective.run(with(Tensor(signal.dtype(), signal.shape(), in.signals[s].values()))).loss;
      check_refused(objective, in, loss,
                    sdk::cat(objective.name(s), " of ", sdk::dtype_name(wrong)));
    }
    std::vector<std::int64_t> shape = signal.shape();
    shape.push_back(2);
    Tensor deeper(signal.dtype(), shape);
    deeper.fill(1);
    check_refused(objective, with(std::move(deeper)), std::nullopt,
                  sdk::cat(objective.name(s), " of shape ", sdk::shape_string(shape)));
    if (objective.needs().size() < 2) continue;
    const ObjectiveInputs fewer = objective.tokens_of(right, size, range(0, 5));
    check_refused(objective, with(fewer.signals[s].copy()), std::nullopt,
                  sdk::cat(objective.name(s), " of one token fewer than the others"));
  }
  check_same(objective, objective.run(right), expected, "after wrong calls");
}

// Wrong outputs, and a wrong number of signals.
void wrong_outputs(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Objective objective(context);
  Random random(context.seed);
  const ObjectiveInputs in = objective.random_inputs({}, dtype, random);
  const auto refused = [&](const char* what, auto&& damage) {
    Objective::Call call;
    objective.fill(call, in);
    damage(call);
    const Outcome outcome = objective.try_call(call);
    if (outcome.ok()) fail(what, ": answers with OK");
    if (outcome.message.empty()) fail(what, ": is refused without a message");
  };
  Tensor pair(sdk::float32, {2}), integer(sdk::int64, {});
  refused("a loss of two numbers", [&](Objective::Call& call) { call.args.loss = pair.c(); });
  refused("a loss of NULL", [](Objective::Call& call) { call.args.loss = nullptr; });
  refused("one signal too few", [](Objective::Call& call) { --call.args.n_signals; });
  std::vector<Tensor> odd;
  for (std::size_t s = 0; s < in.signals.size(); ++s) {
    if ((objective.needs()[s].flags & GRAFT_NEED_GRAD) == 0 || !in.signals[s].there()) continue;
    std::vector<std::int64_t> shape = in.signals[s].shape();
    shape.back() += 1;
    Tensor& grad = odd.emplace_back(in.signals[s].dtype(), shape);
    refused("a gradient of another shape",
            [&](Objective::Call& call) { call.grad_pointers[s] = grad.c(); });
  }
}

void no_grads(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  for_each_configuration(context, [&](Objective& objective) {
    Random random(context.seed);
    ObjectiveInputs in = objective.random_inputs({}, dtype, random);
    const double expected = objective.run(in).loss;
    in.grads = ObjectiveInputs::Grads::none;
    check_loss(objective.run(in).loss, expected, 0, "with grads NULL");
    in.grads = ObjectiveInputs::Grads::null_entries;
    check_loss(objective.run(in).loss, expected, 0, "with NULL for each gradient");
  });
}

void deterministic(Context& context) {
  const DLDataType dtype = exact_dtype(context);
  Objective objective(context), other(context);
  Random random(context.seed);
  const ObjectiveInputs in = objective.random_inputs({3, 43, 259}, dtype, random);
  const ObjectiveOutputs first = objective.run(in);
  objective.run(objective.random_inputs({1, 2, 5}, dtype, random));
  check_same(objective, objective.run(in), first, "the same call again");
  check_same(objective, other.run(in), first, "another instance");
  if (!context.has(GRAFT_CAP_THREAD_INVARIANT)) return;
  context.library.host().set_threads(3);
  check_same(objective, objective.run(in), first, "on three threads (GRAFT_CAP_THREAD_INVARIANT)");
}

}  // namespace

std::vector<Test> objective_tests() {
  constexpr Kind kind = Kind::objective;
  return {
      {"objective.needs", kind, "The table of signals is well formed, whatever the configuration.",
       needs},
      {"objective.gradient", kind, "Gradients agree with differences of the loss.", gradient},
      {"objective.grad_scale", kind, "Gradients are proportional to grad_scale; the loss is not.",
       grad_scale},
      {"objective.mask", kind,
       "What a masked token holds, NaN too, reaches neither the loss nor a gradient.", mask},
      {"objective.padding", kind, "Masked tokens between, before and behind others change nothing.",
       padding},
      {"objective.split", kind,
       "A batch in two parts, put together by the metric \"weight\", is the whole.", split},
      {"objective.token_weight", kind,
       "Weights count relative to each other: equal ones are none, 0 masks.", token_weight},
      {"objective.zero_at_equality", kind,
       "A student equal to its teacher has no loss and no gradient.", zero_at_equality},
      {"objective.large_values", kind,
       "Large values and logits of -inf give finite results, or are refused in words.",
       large_values},
      {"objective.sizes", kind, "One token, one entry, odd and large sizes give complete results.",
       sizes},
      {"objective.dtypes", kind, "Every declared type gives what the most exact one gives.",
       dtypes},
      {"objective.optional_signals", kind,
       "Optional signals may be missing; a required one that is missing is named.",
       optional_signals},
      {"objective.empty", kind, "Where no token counts, loss and gradient are 0.", empty},
      {"objective.workspace", kind, "A workspace that is one byte short is refused.", workspace},
      {"objective.errors", kind,
       "A signal of another type or shape is refused in words, never misread.", errors},
      {"objective.wrong_outputs", kind,
       "Outputs of another shape and missing arguments are refused in words.", wrong_outputs},
      {"objective.no_grads", kind, "The loss is the same where no gradient is wanted.", no_grads},
      {"objective.deterministic", kind,
       "The same call gives the same bytes, in any instance, and on more threads where promised.",
       deterministic},
  };
}

}  // namespace graft::conformance
