// Built twice, with GRAFT_TEST_SCHEMA 1 and 2: one plugin in two versions, of which the second
// reads the first's parameters. y = weight x (+ bias), in float32; it takes neither pads nor
// states.
#include "graft/plugin.hpp"

namespace {

namespace sdk = graft::sdk;

constexpr bool kSecond = GRAFT_TEST_SCHEMA == 2;

class Migrating final : public sdk::Mixer {
 public:
  static sdk::Description describe() {
    sdk::Description d;
    d.id = "org.example.migrating";
    d.alias = "migrating";
    d.version = kSecond ? "2.0.0" : "1.0.0";
    d.param_schema = GRAFT_TEST_SCHEMA;
    d.options.push_back(sdk::Option::integer("width", 2, "entries of the table").shapes());
    d.options.push_back(sdk::Option::real("scale", 1.0, "changes no shape"));
    d.options.push_back(sdk::Option::boolean("unreadable", false, "refuse the older schema"));
    return d;
  }
  Migrating(const sdk::LayerInfo& layer, const sdk::Config& config)
      : model_(layer.model_dim),
        width_(config.get<int64_t>("width")),
        unreadable_(config.get<bool>("unreadable")) {}

  void param_specs(sdk::ParamSpecs& specs) override {
    specs.add(kSecond ? "weight" : "w", "org.example.role.weight", "model", {model_}).ones();
    if (kSecond) specs.add("bias", "org.example.role.bias", "model", {model_}).constant(0.5);
    specs.add("table", "org.example.role.table", "width", {width_}).ones();
    specs.add("extra", "org.example.role.extra", "one", {1}).constant(0.25).optional();
  }
  void plan(const graft_plan_in&, sdk::Plan&) override {}
  void forward(const graft_exec&, const graft_mixer_forward& call) override {
    const auto x = sdk::data<const float>(*call.x, "x");
    const auto y = sdk::data<float>(*call.y, "y");
    const auto weight = sdk::data<const float>(*call.params[0], "weight");
    for (std::size_t i = 0; i < x.size(); ++i) y[i] = weight[i % weight.size()] * x[i];
    if (!kSecond) return;
    const auto bias = sdk::data<const float>(*call.params[1], "bias");
    for (std::size_t i = 0; i < x.size(); ++i) y[i] += bias[i % bias.size()];
  }

  void migrate(std::uint32_t old_schema, const std::map<std::string, const DLTensor*>& old,
               std::span<DLTensor* const> params) override {
    if (old_schema != 1 || unreadable_) return sdk::Mixer::migrate(old_schema, old, params);
    copy(old, "w", *params[0]);
    copy(old, "table", *params[2]);
  }

 private:
  static void copy(const std::map<std::string, const DLTensor*>& old, const std::string& name,
                   const DLTensor& to) {
    const auto found = old.find(name);
    if (found == old.end()) throw sdk::Status(GRAFT_DATA_LOSS, "param:" + name, "is missing");
    const auto from = sdk::data<const float>(*found->second, name);
    std::copy(from.begin(), from.end(), sdk::data<float>(to, name).begin());
  }
  int64_t model_, width_;
  bool unreadable_;
};

// Cannot do without a signal that no host has.
class Demanding final : public sdk::Initializer {
 public:
  static sdk::Description describe() {
    sdk::Description d;
    d.id = "org.example.demanding";
    d.alias = "demanding";
    return d;
  }
  explicit Demanding(const sdk::Config&) {}
  void needs(sdk::RoleNeeds&) override {}
  void calibration(sdk::CalibrationNeeds& needs) override {
    needs.add("org.example.signal.unheard-of", true);
    needs.add("org.example.signal.nice-to-have", false);
  }
  void run(const graft_exec&, sdk::InitArgs&) override {}
};

// Says in how many batches it found a signal that it wants of the first `limit` sequences.
class Limited final : public sdk::Initializer {
 public:
  static sdk::Description describe() {
    sdk::Description d;
    d.id = "org.example.limited";
    d.alias = "limited";
    d.options.push_back(sdk::Option::integer("limit", 2, "sequences of head.context"));
    return d;
  }
  explicit Limited(const sdk::Config& config) : limit_(config.get<int>("limit")) {}
  void needs(sdk::RoleNeeds&) override {}
  void calibration(sdk::CalibrationNeeds& needs) override {
    needs.add(GRAFT_SIGNAL_BLOCK_INPUT, true);
    needs.add(GRAFT_SIGNAL_HEAD_CONTEXT, true, static_cast<uint32_t>(limit_));
  }
  void run(const graft_exec&, sdk::InitArgs& args) override {
    int batches = 0, with_context = 0;
    args.for_each_batch([&](const sdk::Batch& batch) {
      ++batches;
      if (batch.find(GRAFT_SIGNAL_HEAD_CONTEXT) != nullptr) ++with_context;
    });
    throw sdk::Status(GRAFT_INTERNAL, "",
                      sdk::cat("head.context in ", with_context, " of ", batches, " batches"));
  }

 private:
  int limit_;
};

}  // namespace

GRAFT_DEFINE_PLUGIN((sdk::LibraryInfo{.id = "org.example.migrating-pack",
                                      .version = kSecond ? "2.0.0" : "1.0.0",
                                      .license = "MIT"}),
                    sdk::mixer<Migrating>(), sdk::initializer<Demanding>(),
                    sdk::initializer<Limited>())
