// What a plugin says about itself and what it is told: options, configuration, layer facts,
// parameter and tensor specs. The builder types own the C structs they give out; those stay where
// they are for as long as the builder lives.
#pragma once

#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "graft/status.hpp"
#include "graft/tensor.hpp"

namespace graft::sdk {

// ---------------------------------------------------------------- values, options

// A graft_value that owns its string or list.
class Value {
 public:
  Value() = default;  // type 0: unbounded
  static Value of(bool value) {
    Value v(GRAFT_BOOL);
    v.scalar_.i = value ? 1 : 0;
    return v;
  }
  static Value of(int64_t value) {
    Value v(GRAFT_INT);
    v.scalar_.i = value;
    return v;
  }
  static Value of(double value) {
    Value v(GRAFT_FLOAT);
    v.scalar_.f = value;
    return v;
  }
  static Value of(std::string value) {
    Value v(GRAFT_STRING);
    v.text_ = std::move(value);
    return v;
  }
  static Value of(std::vector<int64_t> value) {
    Value v(GRAFT_INT_LIST);
    v.ints_ = std::move(value);
    return v;
  }
  static Value of(std::vector<double> value) {
    Value v(GRAFT_FLOAT_LIST);
    v.reals_ = std::move(value);
    return v;
  }

  // Points into this object.
  graft_value c() const noexcept {
    graft_value value{type_, type_ == 0 ? 0u : 1u, scalar_};
    if (type_ == GRAFT_STRING) value.u.s = text_.c_str();
    if (type_ == GRAFT_INT_LIST) {
      value.count = static_cast<uint32_t>(ints_.size());
      value.u.il = ints_.data();
    }
    if (type_ == GRAFT_FLOAT_LIST) {
      value.count = static_cast<uint32_t>(reals_.size());
      value.u.fl = reals_.data();
    }
    return value;
  }

 private:
  explicit Value(uint32_t type) : type_(type) {}

  uint32_t type_ = 0;
  decltype(graft_value::u) scalar_{0};
  std::string text_;
  std::vector<int64_t> ints_;
  std::vector<double> reals_;
};

// One option of a component: Option::integer("chunk_size", 64, "tokens per chunk").range(1, 4096).
class Option {
 public:
  static Option boolean(std::string key, bool def, std::string doc) {
    return Option(std::move(key), Value::of(def), std::move(doc));
  }
  static Option integer(std::string key, int64_t def, std::string doc) {
    return Option(std::move(key), Value::of(def), std::move(doc));
  }
  static Option real(std::string key, double def, std::string doc) {
    return Option(std::move(key), Value::of(def), std::move(doc));
  }
  static Option string(std::string key, std::string def, std::string doc) {
    return Option(std::move(key), Value::of(std::move(def)), std::move(doc));
  }
  static Option integers(std::string key, std::vector<int64_t> def, std::string doc) {
    return Option(std::move(key), Value::of(std::move(def)), std::move(doc));
  }
  static Option reals(std::string key, std::vector<double> def, std::string doc) {
    return Option(std::move(key), Value::of(std::move(def)), std::move(doc));
  }

  // Inclusive bounds of an integer or integer list, of a real or list of reals. Of lists: each
  // item.
  Option range(int64_t min, int64_t max) && {
    min_ = Value::of(min);
    max_ = Value::of(max);
    return std::move(*this);
  }
  Option range(int min, int max) && {
    return std::move(*this).range(static_cast<int64_t>(min), static_cast<int64_t>(max));
  }
  Option range(double min, double max) && {
    min_ = Value::of(min);
    max_ = Value::of(max);
    return std::move(*this);
  }
  Option at_least(int64_t min) && {
    min_ = Value::of(min);
    return std::move(*this);
  }
  Option at_least(int min) && { return std::move(*this).at_least(static_cast<int64_t>(min)); }
  Option at_least(double min) && {
    min_ = Value::of(min);
    return std::move(*this);
  }
  // The strings that are legal.
  Option one_of(std::vector<std::string> values) && {
    one_of_ = std::move(values);
    return std::move(*this);
  }
  // The user has to give it; the default only says the type.
  Option required() && { return std::move(*this).flag(GRAFT_OPT_REQUIRED); }
  Option deprecated() && { return std::move(*this).flag(GRAFT_OPT_DEPRECATED); }
  // Changes parameter shapes: kept in the checkpoint, and may not differ when it is loaded.
  Option shapes() && { return std::move(*this).flag(GRAFT_OPT_SHAPES); }

  // Points into this object, which must not be moved or changed afterwards.
  const graft_option& c() {
    one_of_c_.clear();
    for (const auto& value : one_of_) one_of_c_.push_back(value.c_str());
    one_of_c_.push_back(nullptr);
    c_ = graft_option{sizeof(graft_option),
                      flags_,
                      key_.c_str(),
                      doc_.c_str(),
                      def_.c(),
                      min_.c(),
                      max_.c(),
                      one_of_.empty() ? nullptr : one_of_c_.data()};
    return c_;
  }

 private:
  Option(std::string key, Value def, std::string doc)
      : key_(std::move(key)), doc_(std::move(doc)), def_(std::move(def)) {}
  Option flag(uint32_t bit) && {
    flags_ |= bit;
    return std::move(*this);
  }

  std::string key_, doc_;
  Value def_, min_, max_;
  std::vector<std::string> one_of_;
  std::vector<const char*> one_of_c_;
  uint32_t flags_ = 0;
  graft_option c_{};
};

namespace detail {

template <class T>
inline constexpr bool is_vector = false;
template <class T>
inline constexpr bool is_vector<std::vector<T>> = true;

inline const char* value_type_name(uint32_t type) noexcept {
  static constexpr const char* names[] = {
      "nothing", "bool", "integer", "float", "string", "list of integers", "list of floats"};
  return type < std::size(names) ? names[type] : "a type unknown to this plugin";
}

}  // namespace detail

// The host's configuration of one component: complete, and checked against the declared options. A
// view that lives as long as the constructor call it is handed to.
class Config {
 public:
  explicit Config(const graft_config* config) : config_(detail::widened(config)) {}

  // T: bool, any integer or floating type, std::string, std::string_view, std::vector of int64_t or
  // double. Throws INVALID_ARGUMENT for a key this component did not declare, or declared as
  // another type.
  template <class T>
  T get(std::string_view key) const {
    const graft_value* const value = find(key);
    if (value == nullptr) {
      throw Status(GRAFT_INVALID_ARGUMENT, cat("config.", key),
                   "the host gave no value for this option");
    }
    return convert<T>(*value, key);
  }

  bool has(std::string_view key) const noexcept { return find(key) != nullptr; }

 private:
  const graft_value* find(std::string_view key) const noexcept {
    for (uint32_t i = 0; i < config_.count; ++i) {
      if (key == config_.keys[i]) return &config_.values[i];
    }
    return nullptr;
  }

  static void expect(const graft_value& value, uint32_t type, std::string_view key) {
    if (value.type == type) return;
    throw Status(GRAFT_INVALID_ARGUMENT, cat("config.", key),
                 cat("expected ", detail::value_type_name(type), ", got ",
                     detail::value_type_name(value.type)));
  }

  template <class T>
  static T convert(const graft_value& value, std::string_view key) {
    if constexpr (std::is_same_v<T, bool>) {
      expect(value, GRAFT_BOOL, key);
      return value.u.i != 0;
    } else if constexpr (std::is_integral_v<T>) {
      expect(value, GRAFT_INT, key);
      if (!std::in_range<T>(value.u.i)) {
        throw Status(GRAFT_OUT_OF_RANGE, cat("config.", key),
                     cat(value.u.i, " does not fit into ", 8 * sizeof(T), " bits"));
      }
      return static_cast<T>(value.u.i);
    } else if constexpr (std::is_floating_point_v<T>) {
      expect(value, GRAFT_FLOAT, key);
      return static_cast<T>(value.u.f);
    } else if constexpr (detail::is_vector<T>) {
      return convert_list<typename T::value_type>(value, key);
    } else {
      static_assert(std::is_same_v<T, std::string> || std::is_same_v<T, std::string_view>,
                    "Config::get<T>: an option is a bool, a number, a string or a list of numbers");
      expect(value, GRAFT_STRING, key);
      return T(value.u.s);
    }
  }

  template <class Item>
  static std::vector<Item> convert_list(const graft_value& value, std::string_view key) {
    if constexpr (std::is_same_v<Item, int64_t>) {
      expect(value, GRAFT_INT_LIST, key);
      return {value.u.il, value.u.il + value.count};
    } else {
      static_assert(std::is_same_v<Item, double>, "a list option holds int64_t or double");
      expect(value, GRAFT_FLOAT_LIST, key);
      return {value.u.fl, value.u.fl + value.count};
    }
  }

  graft_config config_;
};

// ---------------------------------------------------------------- layer

// An owning copy of graft_layer_info; see there for each field.
struct LayerInfo {
  LayerInfo() = default;
  explicit LayerInfo(const graft_layer_info* given) {
    const graft_layer_info info = detail::widened(given);
    layer = info.layer;
    n_layers = info.n_layers;
    n_heads = info.n_heads;
    n_kv_heads = info.n_kv_heads;
    head_dim = info.head_dim;
    model_dim = info.model_dim;
    max_positions = info.max_positions;
    rope_theta = info.rope_theta;
    rope_fraction = info.rope_fraction;
    if (info.rope_scaling != nullptr) rope_scaling = info.rope_scaling;
    if (info.family != nullptr) family = info.family;
    param_dtype = info.param_dtype;
    flags = info.flags;
    norm_eps = info.norm_eps;
    if (info.rope_inv_freq != nullptr && info.n_rope_freq > 0) {
      rope_inv_freq.assign(info.rope_inv_freq, info.rope_inv_freq + info.n_rope_freq);
    }
    rope_attention_factor = info.rope_attention_factor;
  }

  bool has(uint32_t flag) const noexcept { return (flags & flag) != 0; }  // GRAFT_LAYER_*

  int32_t layer = 0, n_layers = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0;
  int64_t model_dim = 0, max_positions = 0;
  double rope_theta = 0, rope_fraction = 0;
  std::string rope_scaling, family;
  DLDataType param_dtype = float32;
  uint32_t flags = 0;
  double norm_eps = 0;
  std::vector<double> rope_inv_freq;  // empty = no RoPE
  double rope_attention_factor = 1;
};

// ---------------------------------------------------------------- parameter specs

// One parameter of a mixer. As made it is trainable, its value is its natural value, and it starts
// as zeros.
class ParamSpec {
 public:
  ParamSpec(std::string name, std::string role, std::string axes, std::span<const int64_t> shape)
      : name_(std::move(name)), role_(std::move(role)), axes_(std::move(axes)) {
    if (shape.size() > std::size(c_.shape)) {
      throw Status(GRAFT_INVALID_ARGUMENT, cat("param:", name_),
                   cat("has ", shape.size(), " axes; at most ", std::size(c_.shape), " fit"));
    }
    std::copy(shape.begin(), shape.end(), c_.shape);
    c_.ndim = static_cast<int32_t>(shape.size());
    c_.flags = GRAFT_P_TRAINABLE;
    c_.init = GRAFT_INIT_ZEROS;
  }

  // The "heads" axis has `heads` heads of `head_dim` rows each.
  ParamSpec& heads(int32_t heads, int32_t head_dim) {
    c_.heads = heads;
    c_.head_dim = head_dim;
    return *this;
  }
  ParamSpec& domain(std::string domain) {
    domain_ = std::move(domain);
    return *this;
  }
  ParamSpec& doc(std::string doc) {
    doc_ = std::move(doc);
    return *this;
  }
  ParamSpec& zeros() { return init(GRAFT_INIT_ZEROS, 0, 0); }
  ParamSpec& ones() { return init(GRAFT_INIT_ONES, 0, 0); }
  ParamSpec& constant(double value) { return init(GRAFT_INIT_CONSTANT, value, 0); }
  ParamSpec& normal(double mean, double deviation) {
    return init(GRAFT_INIT_NORMAL, mean, deviation);
  }
  ParamSpec& uniform(double low, double high) { return init(GRAFT_INIT_UNIFORM, low, high); }
  ParamSpec& eye() { return init(GRAFT_INIT_EYE, 0, 0); }
  ParamSpec& frozen() {
    c_.flags &= ~static_cast<uint32_t>(GRAFT_P_TRAINABLE);
    return *this;
  }
  ParamSpec& no_decay() { return flag(GRAFT_P_NO_DECAY); }
  ParamSpec& fp32() { return flag(GRAFT_P_FP32); }
  ParamSpec& optional() { return flag(GRAFT_P_OPTIONAL); }

  const std::string& name() const noexcept { return name_; }
  const std::string& role() const noexcept { return role_; }
  std::span<const int64_t> shape() const noexcept {
    return {c_.shape, static_cast<std::size_t>(c_.ndim)};
  }

  // Points into this object, which must not be moved or changed afterwards.
  const graft_param_spec& c() noexcept {
    c_.struct_size = sizeof c_;
    c_.name = name_.c_str();
    c_.role = role_.c_str();
    c_.axes = axes_.c_str();
    c_.domain = domain_.c_str();
    c_.doc = doc_.c_str();
    return c_;
  }

 private:
  ParamSpec& init(int32_t kind, double a, double b) {
    c_.init = kind;
    c_.init_a = a;
    c_.init_b = b;
    return *this;
  }
  ParamSpec& flag(uint32_t bit) {
    c_.flags |= bit;
    return *this;
  }

  std::string name_, role_, axes_, domain_, doc_;
  graft_param_spec c_{};
};

// The parameters of a mixer in their fixed order.
class ParamSpecs {
 public:
  // `name` is the checkpoint key; `axes` has one label per entry of `shape`, comma-separated. The
  // reference stays good while more are added.
  ParamSpec& add(std::string name, std::string role, std::string axes,
                 std::initializer_list<int64_t> shape) {
    if (find(name).has_value()) {
      throw Status(GRAFT_INTERNAL, cat("param:", name), "is declared twice");
    }
    return specs_.emplace_back(std::move(name), std::move(role), std::move(axes),
                               std::span<const int64_t>(shape.begin(), shape.size()));
  }

  std::size_t size() const noexcept { return specs_.size(); }
  const ParamSpec& operator[](std::size_t index) const { return specs_[index]; }

  // Position in forward's `params`.
  std::optional<std::size_t> find(std::string_view name) const noexcept {
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      if (specs_[i].name() == name) return i;
    }
    return std::nullopt;
  }

  std::vector<const graft_param_spec*> c() {
    std::vector<const graft_param_spec*> pointers;
    for (auto& spec : specs_) pointers.push_back(&spec.c());
    return pointers;
  }

 private:
  std::deque<ParamSpec> specs_;
};

// ---------------------------------------------------------------- plan

// A list of state, saved or tap tensors for one plan.
class TensorSpecs {
 public:
  void add(std::string name, std::string axes, std::initializer_list<int64_t> shape,
           DLDataType dtype, std::string doc = "") {
    graft_tensor_spec spec{};
    if (shape.size() > std::size(spec.shape)) {
      throw Status(GRAFT_INTERNAL, cat("tensor:", name),
                   cat("has ", shape.size(), " axes; at most ", std::size(spec.shape), " fit"));
    }
    spec.struct_size = sizeof spec;
    std::copy(shape.begin(), shape.end(), spec.shape);
    spec.ndim = static_cast<int32_t>(shape.size());
    spec.dtype = dtype;
    entries_.push_back({std::move(name), std::move(axes), std::move(doc), spec});
  }

  std::size_t size() const noexcept { return entries_.size(); }
  bool empty() const noexcept { return entries_.empty(); }

  // Points into this object until the next add().
  std::span<const graft_tensor_spec* const> c() {
    pointers_.clear();
    for (auto& entry : entries_) {
      entry.c.name = entry.name.c_str();
      entry.c.axes = entry.axes.c_str();
      entry.c.doc = entry.doc.c_str();
      pointers_.push_back(&entry.c);
    }
    return pointers_;
  }

 private:
  struct Entry {
    std::string name, axes, doc;
    graft_tensor_spec c;
  };
  std::deque<Entry> entries_;
  std::vector<const graft_tensor_spec*> pointers_;
};

// What a mixer needs for calls of one shape, device and dtype.
struct Plan {
  TensorSpecs saved;  // forward writes, backward reads
  TensorSpecs state;
  TensorSpecs taps;
  uint64_t workspace_forward = 0, workspace_backward = 0, workspace_step = 0;  // bytes
};

// ---------------------------------------------------------------- description

// How a component introduces itself; returned by its static describe().
struct Description {
  std::string id = {};     // "org.example.gdn": stable for ever
  std::string alias = {};  // "gdn": what --mixer takes
  std::string name = {};
  std::string version = {};
  std::string license = {};   // SPDX
  std::string citation = {};  // BibTeX or URL
  std::string description = {};
  uint64_t caps = 0;          // GRAFT_CAP_*
  uint32_t param_schema = 1;  // mixers: bumped when names, shapes or meaning of parameters change
  std::vector<Option> options = {};
  std::vector<DLDataType> dtypes = {float32};
  std::vector<DLDeviceType> devices = {kDLCPU};
};

// The library a component lies in.
struct LibraryInfo {
  std::string id = {};  // reverse DNS
  std::string vendor = {};
  std::string url = {};
  std::string version = {};
  std::string license = {};  // SPDX
};

namespace detail {

// Keeps a Description and the graft_desc that points into it.
class OwnedDescription {
 public:
  explicit OwnedDescription(Description description) : d_(std::move(description)) {
    for (auto& option : d_.options) options_.push_back(&option.c());
    c_ = graft_desc{sizeof(graft_desc),
                    static_cast<uint32_t>(options_.size()),
                    d_.id.c_str(),
                    d_.alias.c_str(),
                    d_.name.c_str(),
                    d_.version.c_str(),
                    d_.license.c_str(),
                    d_.citation.c_str(),
                    d_.description.c_str(),
                    d_.caps,
                    options_.data(),
                    d_.dtypes.data(),
                    d_.devices.data(),
                    static_cast<uint32_t>(d_.dtypes.size()),
                    static_cast<uint32_t>(d_.devices.size())};
  }
  OwnedDescription(const OwnedDescription&) = delete;
  OwnedDescription& operator=(const OwnedDescription&) = delete;

  const Description& get() const noexcept { return d_; }
  const graft_desc& c() const noexcept { return c_; }

 private:
  Description d_;
  std::vector<const graft_option*> options_;
  graft_desc c_{};
};

}  // namespace detail
}  // namespace graft::sdk
