// What a mixer says of its parameters, and their natural values.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <optional>
#include <set>
#include <sstream>

#include "kit/checks.h"
#include "kit/component.h"
#include "kit/doing.h"
#include "kit/mixer.h"
#include "kit/text_forms.h"

namespace graft::conformance {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinite = std::numeric_limits<double>::infinity();

std::string text(const char* given) { return given == nullptr ? "" : given; }

std::string label(const graft_param_spec& spec) { return sdk::cat("param:", text(spec.name)); }

std::vector<std::int64_t> shape_of(const graft_param_spec& spec) {
  return {spec.shape, spec.shape + spec.ndim};
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, at);) out.push_back(part);
  return out;
}

// ---------------------------------------------------------------- what the specs say

void names(Context& context) {
  const Mixer mixer(context);
  if (mixer.n_params() == 0) skip("has no parameters");
  std::set<std::string> seen;
  for (const graft_param_spec* const spec : mixer.specs()) {
    if (!is_param_name(text(spec->name)))
      fail("'", text(spec->name), "' is no checkpoint key: letters, digits, '_', '-' and '.'");
    if (!seen.insert(spec->name).second) fail(label(*spec), " is there twice");
  }
}

// One label of an axis: "heads*key" has the heads outermost.
void check_axis(const graft_param_spec& spec, const std::string& axis, std::int64_t size) {
  if (axis.empty()) fail(label(spec), ": an axis of '", spec.axes, "' has no label");
  const std::vector<std::string> factors = split(axis, '*');
  if (std::find(factors.begin(), factors.end(), "heads") == factors.end()) return;
  if (spec.heads <= 0)
    fail(label(spec), ": an axis is called '", axis, "', and `heads` is ", spec.heads);
  const std::int64_t expected =
      factors.size() == 1 ? spec.heads : static_cast<std::int64_t>(spec.heads) * spec.head_dim;
  if (size != expected)
    fail(label(spec), ": the axis '", axis, "' has ", size, " entries; expected ", expected, " (",
         spec.heads, " heads of ", spec.head_dim, ")");
}

void check_shape(const graft_param_spec& spec) {
  if (spec.ndim < 0 || spec.ndim > 6) fail(label(spec), " has ", spec.ndim, " axes; 0 to 6 fit");
  for (const std::int64_t size : shape_of(spec)) {
    if (size <= 0)
      fail(label(spec), " has shape ", sdk::shape_string(shape_of(spec)),
           "; expected sizes above 0");
  }
  if (spec.heads < 0 || spec.head_dim < 0)
    fail(label(spec), " has ", spec.heads, " heads of ", spec.head_dim);
}

void axes(Context& context) {
  const Mixer mixer(context);
  if (mixer.n_params() == 0) skip("has no parameters");
  for (const graft_param_spec* const spec : mixer.specs()) {
    check_shape(*spec);
    if (text(spec->axes).empty() && spec->ndim > 0) {
      context.note(label(*spec), " has no axes: no initializer can read its shape");
      continue;
    }
    const std::vector<std::string> all = split(text(spec->axes), ',');
    if (all.size() != static_cast<std::size_t>(spec->ndim))
      fail(label(*spec), ": '", text(spec->axes), "' labels ", all.size(), " axes; it has ",
           spec->ndim);
    for (std::size_t i = 0; i < all.size(); ++i) check_axis(*spec, all[i], spec->shape[i]);
  }
}

// The output projection: [model, *].
void check_output(Context& context, const Mixer& mixer) {
  for (const graft_param_spec* const spec : mixer.specs()) {
    if (text(spec->role) != GRAFT_ROLE_OUTPUT) continue;
    const std::int64_t model = mixer.layer().info.model_dim;
    if (spec->ndim != 2 || spec->shape[0] != model)
      fail(label(*spec), " has the role " GRAFT_ROLE_OUTPUT " and shape ",
           sdk::shape_string(shape_of(*spec)), "; expected [", model, ", ...]");
    return;
  }
  context.note("has no parameter of role " GRAFT_ROLE_OUTPUT ": no initializer can fit its output");
}

void roles(Context& context) {
  const Mixer mixer(context);
  if (mixer.n_params() == 0) skip("has no parameters");
  std::set<std::string> seen;
  for (const graft_param_spec* const spec : mixer.specs()) {
    const std::string role = text(spec->role);
    if (role.empty()) {
      context.note(label(*spec), " has no role: initializers leave it at its default");
      continue;
    }
    if (!is_reverse_dns(role))
      fail(label(*spec), ": the role '", role,
           "' is neither a graft.role.* nor a name under a reverse DNS");
    if (!seen.insert(role).second)
      fail(label(*spec), ": the role '", role, "' is another parameter's already");
  }
  check_output(context, mixer);
}

// All of a spec, to compare two.
std::string everything(const graft_param_spec& spec) {
  return sdk::cat(text(spec.name), " ", spec.flags, " ", text(spec.role), " ", text(spec.axes), " ",
                  text(spec.domain), " ", sdk::shape_string(shape_of(spec)), " ", spec.heads, " ",
                  spec.head_dim, " ", spec.init, " ", spec.init_a, " ", spec.init_b, "\n");
}

std::string read_specs(const Mixer& mixer) {
  const graft_param_spec* const* specs = nullptr;
  std::uint32_t n = 0;
  graft_mixer* const handle = mixer.get();
  must(outcome_of([&](graft_error* e) { return handle->v->param_specs(handle, &specs, &n, e); }),
       "param_specs");
  std::string out;
  for (std::uint32_t i = 0; i < n; ++i) out += everything(*specs[i]);
  return out;
}

void stable(Context& context) {
  Mixer mixer(context);
  const std::string first = read_specs(mixer);
  if (read_specs(mixer) != first) fail("param_specs answers differently the second time");
  if (read_specs(Mixer(context)) != first)
    fail("two mixers of one configuration and layer have different parameters");
  mixer.plan(2, 7, exact_dtype(context));
  if (read_specs(mixer) != first) fail("param_specs answers differently after plan()");
}

void start(Context& context) {
  Mixer mixer(context);
  if (mixer.n_params() == 0) skip("has no parameters");
  static const std::set<std::string> known{
      "", "log", "neg-log", "logit", "softplus-inv", "silu-inv", "residual"};
  Random random(context.seed);
  const std::vector<Tensor> params = mixer.default_params(sdk::float32, random);
  for (std::size_t i = 0; i < params.size(); ++i) {
    const graft_param_spec& spec = *mixer.specs()[i];
    if (spec.init < GRAFT_INIT_ZEROS || spec.init > GRAFT_INIT_EYE)
      fail(label(spec), ": init ", spec.init, " is none of GRAFT_INIT_*");
    if (spec.init == GRAFT_INIT_EYE && spec.ndim < 2)
      fail(label(spec), ": GRAFT_INIT_EYE wants two axes, it has ", spec.ndim);
    if (spec.init == GRAFT_INIT_UNIFORM && spec.init_a > spec.init_b)
      fail(label(spec), ": GRAFT_INIT_UNIFORM from ", spec.init_a, " to ", spec.init_b);
    const std::string domain = text(spec.domain);
    if (!known.contains(domain) && !is_reverse_dns(domain))
      fail(label(spec), ": the domain '", domain, "' is none of graft.h's, nor a reverse DNS name");
    check_finite(params[i], sdk::cat(label(spec), " at its start"));
  }
}

// ---------------------------------------------------------------- gradients

bool all_zero(const Tensor& tensor) {
  for (std::int64_t i = 0; i < tensor.size(); ++i) {
    if (tensor.at(i) != 0) return false;
  }
  return true;
}

void gradients(Context& context) {
  if (!context.has(GRAFT_CAP_BACKWARD)) skip("has no backward (GRAFT_CAP_BACKWARD)");
  Mixer mixer(context);
  if (mixer.n_params() == 0) skip("has no parameters");
  Random random(context.seed);
  MixerInputs in = mixer.random_inputs(2, 24, exact_dtype(context), random);
  in.flags = GRAFT_X_TRAINING;
  const MixerOutputs out = mixer.forward(in);
  Cotangents from;
  from.dy = Tensor(in.x.dtype(), in.x.shape(), random.normals(in.x.size()));
  const Gradients gradients = mixer.backward(in, out, from);
  for (std::size_t i = 0; i < gradients.dparams.size(); ++i) {
    const graft_param_spec& spec = *mixer.specs()[i];
    if (!gradients.dparams[i].there()) continue;
    check_finite(gradients.dparams[i], sdk::cat("the gradient of ", label(spec)));
    if (all_zero(gradients.dparams[i]))
      fail(label(spec), " is GRAFT_P_TRAINABLE, and its gradient at a random point is zero");
  }
}

// ---------------------------------------------------------------- natural values

// Parameters as graft.mixer-domain/1 takes them.
class Domain {
 public:
  explicit Domain(Mixer& mixer) : mixer_(mixer) {
    const auto get = mixer.get()->v->get_extension;
    if (get != nullptr)
      table_ = static_cast<const graft_mixer_domain*>(get(mixer.get(), GRAFT_EXT_MIXER_DOMAIN));
  }
  bool there() const { return table_ != nullptr && table_->set != nullptr; }

  Outcome set(const char* what, const std::vector<double>& values, std::vector<Tensor>& params,
              std::vector<std::uint8_t>& written) const {
    doing(sdk::cat("set of ", what));
    std::vector<DLTensor*> pointers;
    for (Tensor& param : params) pointers.push_back(param.c());
    return outcome_of([&](graft_error* e) {
      return table_->set(mixer_.get(), what, static_cast<std::uint32_t>(values.size()),
                         values.data(), pointers.data(), written.data(), e);
    });
  }

 private:
  Mixer& mixer_;
  const graft_mixer_domain* table_ = nullptr;
};

struct Natural {
  const char* what;
  const char* tap;                    // where it shows; NULL: nowhere
  std::vector<double> values, wrong;  // legal ones; ones that no head can have
};

std::vector<Natural> naturals() {
  return {{GRAFT_NATURAL_HALF_LIFE, GRAFT_TAP_LOG_DECAY, {7, 40, 300, kInfinite}, {0, -3}},
          {GRAFT_NATURAL_WRITE_GATE, GRAFT_TAP_WRITE_GATE, {0.15, 0.5, 0.9}, {-0.5, 1.5}},
          {GRAFT_NATURAL_OUTPUT_GATE, nullptr, {1, 0.5}, {}}};
}

// What the tap shows where the quantity is `value`.
double shown(const Natural& natural, double value) {
  return std::string_view(natural.what) == GRAFT_NATURAL_HALF_LIFE ? -std::numbers::ln2 / value
                                                                   : value;
}

std::optional<std::size_t> tap_index(const Plan& plan, const char* name) {
  for (std::size_t i = 0; name != nullptr && i < plan.taps.size(); ++i) {
    if (plan.taps[i].name == name) return i;
  }
  return std::nullopt;
}

// The number of heads: of a gate's tap, else of the block.
std::size_t head_count(Mixer& mixer, const Plan& plan) {
  for (const char* const tap : {GRAFT_TAP_LOG_DECAY, GRAFT_TAP_WRITE_GATE}) {
    if (const auto i = tap_index(plan, tap))
      return static_cast<std::size_t>(plan.taps[*i].shape.at(2));
  }
  return static_cast<std::size_t>(mixer.layer().info.n_heads);
}

void check_written(const Mixer& mixer, const std::vector<Tensor>& before,
                   const std::vector<Tensor>& after, const std::vector<std::uint8_t>& written,
                   const char* what) {
  for (std::size_t i = 0; i < before.size(); ++i) {
    const bool changed = !after[i].same_bytes(before[i]);
    if (!after[i].intact()) fail("set of ", what, " writes past ", label(*mixer.specs()[i]));
    if (changed && written[i] == 0)
      fail("set of ", what, " changes ", label(*mixer.specs()[i]), ", and written[", i, "] is 0");
    if (!changed && written[i] != 0)
      fail("set of ", what, " says that it wrote ", label(*mixer.specs()[i]),
           ", which is as it was");
  }
}

std::vector<Tensor> copy_all(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> out;
  for (const Tensor& tensor : tensors) out.push_back(tensor.copy());
  return out;
}

// The tap of a forward pass on random x, with these parameters.
Tensor tap_with(Context& context, Mixer& mixer, const std::vector<Tensor>& params,
                std::size_t tap) {
  Random random(context.seed + 1);
  MixerInputs in = mixer.random_inputs(2, 11, exact_dtype(context), random);
  for (std::size_t i = 0; i < params.size(); ++i) in.params[i].set(params[i].values());
  MixerOutputs out = mixer.forward(in);
  return std::move(out.taps.at(tap));
}

void check_shown(const Natural& natural, const Tensor& tap, const std::vector<double>& values,
                 double factor) {
  // Parameters are float32 and go through exp, log or softplus; a quantity that only infinity
  // would reach is close to it.
  const double kRelative = 1e-4 * factor, kAbsolute = 1e-6 * factor;
  for (std::int64_t i = 0; i < tap.size(); ++i) {
    const std::size_t head = static_cast<std::size_t>(i) % values.size();
    const double expected = shown(natural, values[head]), got = tap.at(i);
    if (!(std::fabs(got - expected) <= kRelative * std::fabs(expected) + kAbsolute))
      fail("after set of ", natural.what, " to ", values[head], " the tap ", natural.tap, " is ",
           got, " at element ", i, "; expected ", expected, " for any input");
  }
}

struct NaturalRig {
  Context& context;
  Mixer& mixer;
  Domain domain;
  Plan plan;
  std::size_t heads;
  std::vector<Tensor> params;
};

// Configurations share their answers.
void note_once(Context& context, const std::string& text) {
  if (std::find(context.notes.begin(), context.notes.end(), text) == context.notes.end())
    context.note(text);
}

// Another value per head, in turn.
void set_and_look(NaturalRig& rig, const Natural& natural, std::size_t first) {
  std::vector<double> values;
  for (std::size_t h = 0; h < rig.heads; ++h)
    values.push_back(natural.values[(first + h) % natural.values.size()]);
  std::vector<Tensor> params = copy_all(rig.params);
  std::vector<std::uint8_t> written(params.size(), 0);
  const Outcome outcome = rig.domain.set(natural.what, values, params, written);
  if (outcome.status == GRAFT_UNIMPLEMENTED) {
    note_once(rig.context, sdk::cat(natural.what, ": ", outcome.message));
    check_written(rig.mixer, rig.params, params, std::vector<std::uint8_t>(params.size(), 0),
                  natural.what);
    return;
  }
  must(outcome, sdk::cat("set of ", natural.what));
  check_written(rig.mixer, rig.params, params, written, natural.what);
  for (std::size_t i = 0; i < params.size(); ++i)
    check_finite(params[i], label(*rig.mixer.specs()[i]));
  if (const auto tap = tap_index(rig.plan, natural.tap))
    check_shown(natural, tap_with(rig.context, rig.mixer, params, *tap), values,
                rig.context.tolerance);
}

// An output gate of a half halves what comes before the output projection.
void check_output_gate(NaturalRig& rig) {
  const auto tap = tap_index(rig.plan, GRAFT_TAP_PRE_OUTPUT);
  if (!tap) return;
  std::vector<Tensor> shown;
  for (const double value : {1.0, 0.5}) {
    std::vector<Tensor> params = copy_all(rig.params);
    std::vector<std::uint8_t> written(params.size(), 0);
    const std::vector<double> values(rig.heads, value);
    if (!rig.domain.set(GRAFT_NATURAL_OUTPUT_GATE, values, params, written).ok()) return;
    shown.push_back(tap_with(rig.context, rig.mixer, params, *tap));
  }
  for (std::int64_t i = 0; i < shown[1].size(); ++i) shown[1].set(i, 2 * shown[1].at(i));
  constexpr double kClose = 1e-4;
  check_close(shown[1], shown[0], kClose * rig.context.tolerance,
              "twice the tap " GRAFT_TAP_PRE_OUTPUT " of an output gate of 0.5, and that of one");
}

// What is wrong is refused, and nothing is written.
void check_refused(NaturalRig& rig, const char* what, const std::vector<double>& values,
                   const std::string& how) {
  std::vector<Tensor> params = copy_all(rig.params);
  std::vector<std::uint8_t> written(params.size(), 0);
  const Outcome outcome = rig.domain.set(what, values, params, written);
  if (outcome.ok()) fail("set of ", what, " with ", how, " answers OK; expected a refusal");
  if (outcome.message.empty())
    fail("set of ", what, " with ", how, " is refused without a message");
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!params[i].same_bytes(rig.params[i]))
      fail("set of ", what, " with ", how, " is refused, and ", label(*rig.mixer.specs()[i]),
           " has changed");
  }
}

void check_wrong(NaturalRig& rig, const Natural& natural) {
  const double right = natural.values[0];
  check_refused(rig, natural.what, std::vector<double>(rig.heads + 1, right), "a value too many");
  if (rig.heads > 1)
    check_refused(rig, natural.what, std::vector<double>(rig.heads - 1, right), "a value too few");
  for (const double wrong : natural.wrong) {
    std::vector<double> values(rig.heads, right);
    values.back() = wrong;
    check_refused(rig, natural.what, values, sdk::cat("the value ", wrong));
  }
  std::vector<double> values(rig.heads, right);
  values.back() = kNaN;
  check_refused(rig, natural.what, values, "the value NaN");
}

void natural_values(Context& context, Mixer& mixer) {
  Domain domain(mixer);
  if (!domain.there()) skip("has no " GRAFT_EXT_MIXER_DOMAIN);
  Random random(context.seed);
  NaturalRig rig{context, mixer,
                 domain,  mixer.plan(2, 11, exact_dtype(context)),
                 0,       mixer.random_params(sdk::float32, random)};
  rig.heads = head_count(mixer, rig.plan);
  for (const Natural& natural : naturals()) {
    for (std::size_t first = 0; first < natural.values.size(); ++first)
      set_and_look(rig, natural, first);
    check_wrong(rig, natural);
  }
  check_output_gate(rig);
  check_refused(rig, "org.example.no-such-quantity", std::vector<double>(rig.heads, 1.0),
                "a quantity nobody has");
}

// Biases and gates come and go with the options, so each configuration is one more mixer to ask.
void natural(Context& context) {
  for (const NamedOptions& configuration : configurations(context.desc(), context.options)) {
    const CompleteConfig config(context.desc(), configuration.options);
    if (!Instance(context.library, *context.component, config.c()).outcome().ok()) continue;
    Mixer mixer(context, small_layer(), configuration.options);
    try {
      natural_values(context, mixer);
    } catch (const Failed& problem) {
      fail(configuration.name, ": ", problem.what());
    }
  }
}

}  // namespace

std::vector<Test> params_tests() {
  return {
      {"params.names", Kind::mixer, "Parameters have unique names that a checkpoint can keep.",
       names},
      {"params.axes", Kind::mixer, "Shapes, labels of axes and numbers of heads agree.", axes},
      {"params.roles", Kind::mixer,
       "Roles are graft's or under a reverse DNS, and no two parameters share one.", roles},
      {"params.stable", Kind::mixer,
       "Equal configurations have equal parameters, whenever they are asked for.", stable},
      {"params.defaults", Kind::mixer, "Parameters start finite, in a domain that is known.",
       start},
      {"params.gradients", Kind::mixer, "Every trainable parameter has a gradient.", gradients},
      {"natural.values", Kind::mixer,
       "Half-life and gates become what they are set to, for any input, or are refused.", natural},
  };
}

}  // namespace graft::conformance
