// What a mixer says of its parameters, and what it does with them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <sstream>

#include "kit/checks.h"
#include "kit/mixer.h"
#include "kit/names.h"

namespace graft::conformance {
namespace {

std::string text(const char* s) { return s == nullptr ? "" : s; }

std::int64_t labels_in(const std::string& axes) {
  return axes.empty() ? 0 : 1 + std::count(axes.begin(), axes.end(), ',');
}

void names(Context& context) {
  Mixer mixer(context);
  std::set<std::string> seen;
  for (const graft_param_spec* const spec : mixer.specs()) {
    const std::string name = text(spec->name);
    if (name.empty()) fail("a parameter has no name");
    if (name.find_first_not_of(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.") !=
        std::string::npos) {
      fail("parameter '", name, "': a checkpoint's key is made of letters, digits, '_' and '.'");
    }
    if (!seen.insert(name).second) fail("two parameters are called '", name, "'");
  }
}

void axes(Context& context) {
  for (const Layer& layer : all_layers()) {
    try {
      Mixer mixer(context, layer);
      for (const graft_param_spec* const spec : mixer.specs()) {
        const std::string name = text(spec->name), axes = text(spec->axes);
        if (spec->ndim < 1 || spec->ndim > 6)
          fail("parameter '", name, "' has ", spec->ndim, " axes, expected 1 to 6");
        if (labels_in(axes) != spec->ndim)
          fail("parameter '", name, "' has ", spec->ndim, " axes and the labels \"", axes, "\"");
        for (std::int32_t i = 0; i < spec->ndim; ++i) {
          if (spec->shape[i] <= 0)
            fail("parameter '", name, "' has ", spec->shape[i], " elements on axis ", i);
        }
        if (spec->heads < 0 || spec->head_dim < 0)
          fail("parameter '", name, "' has a negative number of heads or head_dim");
      }
    } catch (const Skipped& why) {
      context.note(why.what());
    }
  }
}

void roles(Context& context) {
  Mixer mixer(context);
  std::set<std::string> seen;
  for (const graft_param_spec* const spec : mixer.specs()) {
    const std::string problem = role_problem(spec->role);
    if (!problem.empty()) fail("parameter '", text(spec->name), "': ", problem);
    if (!seen.insert(text(spec->role)).second)
      fail("two parameters have the role ", text(spec->role));
  }
  if (!seen.contains(GRAFT_ROLE_OUTPUT))
    context.note("no parameter has the role " GRAFT_ROLE_OUTPUT ": no closed-form start");
}

// Everything a host may keep of a spec.
std::string written(const graft_param_spec& spec) {
  std::ostringstream out;
  out << text(spec.name) << '|' << text(spec.role) << '|' << text(spec.axes) << '|'
      << text(spec.domain) << '|' << spec.flags << '|' << spec.heads << '|' << spec.head_dim << '|'
      << spec.init << '|' << spec.init_a << '|' << spec.init_b;
  for (std::int32_t i = 0; i < spec.ndim; ++i) out << '|' << spec.shape[i];
  return out.str();
}

std::vector<std::string> specs_of(Mixer& mixer) {
  const graft_param_spec* const* specs = nullptr;
  std::uint32_t n = 0;
  must(outcome_of(
           [&](graft_error* e) { return mixer.get()->v->param_specs(mixer.get(), &specs, &n, e); }),
       "param_specs");
  std::vector<std::string> out;
  for (std::uint32_t i = 0; i < n; ++i) out.push_back(written(*specs[i]));
  return out;
}

void stable(Context& context) {
  Mixer one(context), other(context);
  const std::vector<std::string> first = specs_of(one);
  if (specs_of(one) != first) fail("param_specs answers otherwise when it is asked again");
  one.plan(2, 9, exact_dtype(context));
  if (specs_of(one) != first) fail("param_specs answers otherwise after plan()");
  if (specs_of(other) != first) fail("two instances of one configuration have other parameters");
}

void defaults(Context& context) {
  static const std::set<std::string> domains = {
      "", "log", "neg-log", "logit", "softplus-inv", "silu-inv", "residual"};
  Mixer mixer(context);
  Random random(context.seed);
  for (const Tensor& tensor : mixer.default_params(sdk::float32, random))
    check_finite(tensor, "a parameter's start");
  for (const graft_param_spec* const spec : mixer.specs()) {
    const std::string domain = text(spec->domain);
    if (!domains.contains(domain) && domain.find('.') == std::string::npos) {
      fail("parameter '", text(spec->name), "' has the domain '", domain,
           "', which is neither known nor under a reverse DNS");
    }
    if (spec->init == GRAFT_INIT_EYE && spec->ndim < 2)
      fail("parameter '", text(spec->name), "' starts as an identity of one axis");
  }
}

void gradients(Context& context) {
  if (!context.has(GRAFT_CAP_BACKWARD)) skip("does not train (GRAFT_CAP_BACKWARD)");
  const DLDataType dtype = exact_dtype(context);
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(2, 24, dtype, random);
  in.flags = GRAFT_X_TRAINING;
  Cotangents from;
  from.dy = Tensor(dtype, in.x.shape(), random.normals(in.x.size()));
  const Gradients gradients = mixer.backward(in, mixer.forward(in), from);
  for (std::size_t i = 0; i < gradients.dparams.size(); ++i) {
    if (!gradients.dparams[i].there()) continue;
    const std::vector<double> values = gradients.dparams[i].values();
    if (std::ranges::all_of(values, [](double v) { return v == 0; })) {
      fail("parameter '", text(mixer.specs()[i]->name),
           "' is declared trainable, and its gradient at a random point is zero");
    }
  }
}

// ---------------------------------------------------------------- natural values

class Natural {
 public:
  Natural(Context& context, Mixer& mixer) : context_(context), mixer_(mixer) {
    const void* const found =
        mixer.get()->v->get_extension == nullptr
            ? nullptr
            : mixer.get()->v->get_extension(mixer.get(), GRAFT_EXT_MIXER_DOMAIN);
    if (found == nullptr) skip("has no " GRAFT_EXT_MIXER_DOMAIN);
    domain_ = static_cast<const graft_mixer_domain*>(found);
  }

  Outcome set(const char* what, const std::vector<double>& values, std::vector<Tensor>& params,
              std::vector<std::uint8_t>* written) {
    std::vector<DLTensor*> pointers;
    for (Tensor& param : params) pointers.push_back(param.c());
    return outcome_of([&](graft_error* e) {
      return domain_->set(mixer_.get(), what, static_cast<std::uint32_t>(values.size()),
                          values.data(), pointers.data(),
                          written == nullptr ? nullptr : written->data(), e);
    });
  }

  // Sets `value` for every head, and proves it by the tap where there is one.
  bool check(const char* what, double value, const char* tap, double expected, Random& random) {
    std::vector<Tensor> params = mixer_.random_params(sdk::float32, random);
    const std::vector<Tensor> before = copies(params);
    std::vector<std::uint8_t> written(params.size(), 0);
    const auto heads = static_cast<std::size_t>(heads_of());
    const Outcome outcome = set(what, std::vector<double>(heads, value), params, &written);
    if (outcome.status == GRAFT_UNIMPLEMENTED) return false;
    must(outcome, sdk::cat("setting ", what, " to ", value));
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (written[i] == 0 && !params[i].same_bytes(before[i])) {
        fail("setting ", what, " changes parameter '", mixer_.specs()[i]->name,
             "' and does not mark it as written");
      }
      if (!params[i].intact())
        fail("setting ", what, " writes past the end of parameter '", mixer_.specs()[i]->name, "'");
    }
    prove(what, params, tap, expected, random);
    return true;
  }

  void check_refused(const char* what, const std::vector<double>& values, const std::string& why,
                     Random& random) {
    std::vector<Tensor> params = mixer_.random_params(sdk::float32, random);
    const std::vector<Tensor> before = copies(params);
    const Outcome outcome = set(what, values, params, nullptr);
    if (outcome.ok()) fail("takes ", what, " of ", why);
    if (outcome.message.empty()) fail("refuses ", what, " of ", why, " without a message");
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!params[i].same_bytes(before[i]))
        fail("refuses ", what, " of ", why, " and has changed parameter '", mixer_.specs()[i]->name,
             "'");
    }
  }

  std::int32_t heads_of() const {
    std::int32_t heads = 1;
    for (const graft_param_spec* const spec : mixer_.specs()) {
      if (text(spec->role) == GRAFT_ROLE_QUERY && spec->heads > 0) return spec->heads;
      heads = std::max(heads, spec->heads);
    }
    return heads;
  }

 private:
  void prove(const char* what, std::vector<Tensor>& params, const char* tap, double expected,
             Random& random) {
    if (tap == nullptr || !offers(context_, sdk::float32)) return;
    const Plan plan = mixer_.plan(2, 11, sdk::float32);
    for (std::size_t i = 0; i < plan.taps.size(); ++i) {
      if (plan.taps[i].name != tap) continue;
      MixerInputs in = mixer_.random_inputs(2, 11, sdk::float32, random);
      in.params = copies(params);
      for (const double value : mixer_.forward(in).taps[i].values()) {
        if (std::fabs(value - expected) > 1e-4 * std::max(1.0, std::fabs(expected))) {
          fail("after setting ", what, " the tap ", tap, " is ", value, ", expected ", expected,
               " for every token");
        }
      }
    }
  }

  Context& context_;
  Mixer& mixer_;
  const graft_mixer_domain* domain_ = nullptr;
};

void natural_values(Context& context) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  Mixer mixer(context);
  Natural natural(context, mixer);
  Random random(context.seed);
  const auto heads = static_cast<std::size_t>(natural.heads_of());
  if (natural.check(GRAFT_NATURAL_HALF_LIFE, 16, GRAFT_TAP_LOG_DECAY, -std::log(2.0) / 16,
                    random)) {
    natural.check(GRAFT_NATURAL_HALF_LIFE, 0.5, GRAFT_TAP_LOG_DECAY, -std::log(2.0) / 0.5, random);
    natural.check_refused(GRAFT_NATURAL_HALF_LIFE, std::vector<double>(heads, 0), "0", random);
    natural.check_refused(GRAFT_NATURAL_HALF_LIFE, std::vector<double>(heads, kNan), "NaN", random);
    natural.check_refused(GRAFT_NATURAL_HALF_LIFE, std::vector<double>(heads + 1, 4),
                          "one head too many", random);
  } else {
    context.note("no half-life can be set");
  }
  if (natural.check(GRAFT_NATURAL_WRITE_GATE, 0.25, GRAFT_TAP_WRITE_GATE, 0.25, random)) {
    natural.check_refused(GRAFT_NATURAL_WRITE_GATE, std::vector<double>(heads, -1), "-1", random);
  } else {
    context.note("no write gate of 0.25 can be set");
  }
  if (!natural.check(GRAFT_NATURAL_OUTPUT_GATE, 1, nullptr, 0, random))
    context.note("no output gate can be set");
  natural.check_refused("org.example.no-such-quantity", std::vector<double>(heads, 1),
                        "no such name", random);
}

}  // namespace

std::vector<Test> params_tests() {
  return {
      {"params.names", Kind::mixer,
       "Parameters have names of their own, fit to be keys of a checkpoint.", names},
      {"params.axes", Kind::mixer,
       "Each axis of a parameter has a label and elements, for every block that is served.", axes},
      {"params.roles", Kind::mixer, "Each parameter has a role, and no two have one.", roles},
      {"params.stable", Kind::mixer,
       "One configuration has one list of parameters, whenever it is asked.", stable},
      {"params.defaults", Kind::mixer, "Parameters start finite, in a domain that is known.",
       defaults},
      {"params.gradients", Kind::mixer, "What is declared trainable gets a gradient.", gradients},
      {"natural.values", Kind::mixer,
       "Natural values hold for every token, mark what they wrote, and are refused when they make "
       "no sense.",
       natural_values},
  };
}

}  // namespace graft::conformance
