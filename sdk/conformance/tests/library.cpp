// What holds of a plugin's file and of the library in it.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>

#include "kit/component.h"
#include "kit/doing.h"
#include "kit/elf_file.h"
#include "kit/mixer.h"
#include "kit/sha256.h"
#include "kit/sidecar.h"
#include "kit/text_forms.h"

namespace graft::conformance {
namespace {

std::string text(const char* given) { return given == nullptr ? "" : given; }

std::string abi_text(std::uint32_t abi) {
  return sdk::cat(GRAFT_ABI_MAJOR(abi), ".", GRAFT_ABI_MINOR(abi));
}

std::string label(const Component& component) {
  return sdk::cat(name_of(component.kind), " '", name_of(*component.desc), "'");
}

// ---------------------------------------------------------------- use of all components

void use_mixer(Context& context) {
  Random random(context.seed);
  Mixer mixer(context);
  MixerInputs in = mixer.random_inputs(2, 9, exact_dtype(context), random);
  if (context.has(GRAFT_CAP_BACKWARD)) in.flags = GRAFT_X_TRAINING;
  const MixerOutputs out = mixer.forward(in);
  if (context.has(GRAFT_CAP_BACKWARD)) {
    Cotangents from;
    from.dy = Tensor(in.x.dtype(), in.x.shape(), random.normals(in.x.size()));
    mixer.backward(in, out, from);
  }
  if (!context.has(GRAFT_CAP_STEP)) return;
  MixerInputs one = mixer.random_inputs(2, 1, in.x.dtype(), random);
  for (const Plan::Spec& spec : mixer.plan(2, 1, in.x.dtype()).state) {
    one.state.emplace_back(spec.dtype, spec.shape);
    one.state.back().fill(0);
  }
  mixer.step(one);
}

// Makes an instance of each component, calls the mixers, and destroys them again.
void use_all(const Context& context) {
  for (const Component& component : context.library.components()) {
    doing(sdk::cat("use of ", label(component)));
    Context own = context_of(context, component);
    if (component.kind == Kind::mixer) {
      use_mixer(own);
      continue;
    }
    const CompleteConfig config(*component.desc, own.options);
    must(Instance(context.library, component, config.c()).outcome(),
         sdk::cat(label(component), ": create"));
  }
}

// ---------------------------------------------------------------- negotiation

struct Negotiated {
  Outcome outcome;
  graft_negotiate_out out{};
};

graft_negotiate_in offer(std::uint32_t min_abi, std::uint32_t max_abi) {
  return {sizeof(graft_negotiate_in), DLPACK_MAJOR_VERSION, min_abi, max_abi,
          "graft-conformance",        kKitVersion.data()};
}

Negotiated negotiate(const Library& library, const graft_negotiate_in& in) {
  Negotiated answer;
  answer.out.struct_size = sizeof answer.out;
  answer.outcome =
      outcome_of([&](graft_error* e) { return library.negotiate()(&in, &answer.out, e); });
  return answer;
}

void check_refuses(const Library& library, std::uint32_t min_abi, std::uint32_t max_abi) {
  const std::string range = sdk::cat("ABI ", abi_text(min_abi), " to ", abi_text(max_abi));
  const Negotiated answer = negotiate(library, offer(min_abi, max_abi));
  if (answer.outcome.status != GRAFT_ABI_MISMATCH)
    fail("a host of ", range, ": expected GRAFT_ABI_MISMATCH (", GRAFT_ABI_MISMATCH, "), got ",
         answer.outcome.text());
  if (answer.outcome.message.empty())
    fail("a host of ", range, " is refused without a message; name both sides' versions");
}

void check_same_plugin(const Library& library, const Negotiated& answer, const char* how) {
  must(answer.outcome, sdk::cat("negotiation ", how));
  if (answer.out.plugin != &library.plugin())
    fail("negotiation ", how, " gives another graft_plugin than the first time");
  if (answer.out.abi != library.abi())
    fail("negotiation ", how, " picks ABI ", abi_text(answer.out.abi), ", the first time ",
         abi_text(library.abi()));
}

// A host of a later ABI has more fields, one of an earlier ABI fewer: here names are missing, and
// what lies behind is no memory. graft_negotiate_out has never been smaller than it is.
void other_sizes(const Library& library) {
  struct LaterIn {
    graft_negotiate_in known;
    unsigned char more[64];
  } in{offer(library.abi(), library.abi()), {}};
  std::memset(in.more, 0xA5, sizeof in.more);
  in.known.struct_size = sizeof in;
  check_same_plugin(library, negotiate(library, in.known), "with a larger graft_negotiate_in");

  graft_negotiate_in shorter = offer(library.abi(), library.abi());
  shorter.struct_size = offsetof(graft_negotiate_in, host_name);
  std::memset(&shorter.host_name, 0xA5, sizeof shorter - shorter.struct_size);
  check_same_plugin(library, negotiate(library, shorter),
                    "with a graft_negotiate_in that ends before host_name");

  struct LaterOut {
    graft_negotiate_out known;
    unsigned char more[64];
  } out{};
  out.known.struct_size = sizeof out;
  const graft_negotiate_in offered = offer(library.abi(), library.abi());
  Negotiated answer;
  answer.outcome =
      outcome_of([&](graft_error* e) { return library.negotiate()(&offered, &out.known, e); });
  answer.out = out.known;
  check_same_plugin(library, answer, "with a larger graft_negotiate_out");
  if (std::any_of(std::begin(out.more), std::end(out.more), [](unsigned char b) { return b != 0; }))
    fail("negotiation writes behind the graft_negotiate_out it knows");
}

void negotiation(Context& context) {
  const Library& library = context.library;
  if (library.abi() < GRAFT_ABI(GRAFT_ABI_MAJOR(GRAFT_ABI_CURRENT), 0) ||
      library.abi() > GRAFT_ABI_CURRENT)
    fail("picks ABI ", abi_text(library.abi()), ", which is outside what the host offers");
  const std::uint32_t later = GRAFT_ABI_MAJOR(library.abi()) + 100;
  check_refuses(library, GRAFT_ABI(later, 0), GRAFT_ABI(later, 9));
  check_refuses(library, GRAFT_ABI(0, 0), GRAFT_ABI(0, 0));
  check_same_plugin(library, negotiate(library, offer(library.abi(), library.abi())), "once more");
  check_same_plugin(library, negotiate(library, offer(library.abi(), GRAFT_ABI(later, 0))),
                    "with a host that speaks later versions too");
  other_sizes(library);
  constexpr double kLongest = 0.1;
  const double seconds = library.opening().negotiation_seconds;
  context.note("negotiation: ", 1000 * seconds, " ms");
  if (seconds > kLongest)
    fail("negotiation takes ", 1000 * seconds, " ms of the processor, ", 1000 * kLongest,
         " allowed: leave what is slow to init() or create()");
}

void one_symbol(Context& context) {
  const std::vector<std::string> symbols = exported_symbols(context.library.file());
  std::string others;
  for (const std::string& name : symbols) {
    if (name != GRAFT_ENTRY_SYMBOL) others += (others.empty() ? "" : ", ") + name;
  }
  if (!others.empty())
    fail("exports more than " GRAFT_ENTRY_SYMBOL ": ", others.substr(0, 400),
         "; hide them with -fvisibility=hidden and a version script");
  if (symbols.size() != 1)
    fail("exports ", symbols.size(), " symbols; expected 1, " GRAFT_ENTRY_SYMBOL);
}

// ---------------------------------------------------------------- init and deinit

void init_counted(Context& context) {
  const graft_plugin& plugin = context.library.plugin();
  if (plugin.init == nullptr && plugin.deinit == nullptr) skip("has neither init nor deinit");
  // A plugin may keep the first host it is given, and a host lives until the process ends.
  static std::vector<std::unique_ptr<TestHost>>& hosts =
      *new std::vector<std::unique_ptr<TestHost>>;
  constexpr int kTimes = 3;
  for (int i = 0; i < kTimes; ++i) {
    hosts.push_back(std::make_unique<TestHost>(context.library.abi()));
    if (plugin.init != nullptr) {
      must(outcome_of([&](graft_error* e) {
             return plugin.init(hosts.back()->c(), context.library.file().c_str(), e);
           }),
           sdk::cat("init no. ", i + 2));
    }
    use_all(context);
  }
  for (int i = 0; i < kTimes; ++i) {
    if (plugin.deinit != nullptr) plugin.deinit();
    doing(sdk::cat("use after ", i + 1, " of ", kTimes + 1, " deinit"));
    use_all(context);
  }
}

// ---------------------------------------------------------------- extensions

// An id nobody has, and those of `known` a little changed.
std::vector<std::string> unknown_ids(const std::vector<const char*>& known) {
  std::vector<std::string> out{"", "org.example.no-such-extension/1", "graft."};
  for (const std::string id : known) {
    for (const char* const behind : {" ", "x", "/1", "0", "\n"}) out.push_back(id + behind);
    out.push_back(id.substr(0, id.size() - 1));
    out.push_back(id.substr(0, id.find('/')));
    out.push_back(id.substr(1));
  }
  return out;
}

template <class Get>
void check_unknown(const std::string& whose, const std::vector<const char*>& known, Get&& get) {
  for (const std::string& id : unknown_ids(known)) {
    doing(sdk::cat("get_extension('", id, "') of ", whose));
    if (get(id.c_str()) != nullptr)
      fail(whose, ": get_extension('", id, "') gives a table; expected NULL, the id is unknown");
  }
  doing(sdk::cat("get_extension(NULL) of ", whose));
  if (get(nullptr) != nullptr) fail(whose, ": get_extension(NULL) gives a table; expected NULL");
}

void unknown_extensions(Context& context) {
  check_unknown(
      "the library",
      {GRAFT_EXT_MIXER_FACTORY, GRAFT_EXT_INITIALIZER_FACTORY, GRAFT_EXT_OBJECTIVE_FACTORY},
      [&](const char* id) { return context.library.plugin().get_extension(id); });
  for (const Component& component : context.library.components()) {
    const CompleteConfig config(*component.desc, options_for(*component.desc, context.settings));
    const Instance instance(context.library, component, config.c());
    must(instance.outcome(), sdk::cat(label(component), ": create"));
    if (!instance.extensible()) continue;
    check_unknown(label(component),
                  {GRAFT_EXT_MIXER_DOMAIN, GRAFT_EXT_MIXER_MIGRATE, GRAFT_EXT_TORCH_NATIVE},
                  [&](const char* id) { return instance.extension(id); });
  }
}

// ---------------------------------------------------------------- descriptors

void check_licence(const std::string& whose, const char* licence) {
  if (text(licence).empty()) return;
  const std::string problem = spdx_problem(licence);
  if (!problem.empty()) fail(whose, ": the licence '", licence, "' ", problem);
}

void check_version(const std::string& whose, const char* version) {
  if (!text(version).empty() && !is_semver(version))
    fail(whose, ": the version '", version, "' is no semantic version like 1.2.0");
}

void check_id(const std::string& whose, const char* id) {
  if (!is_reverse_dns(text(id)))
    fail(whose, ": the id '", text(id), "' is no reverse DNS name like org.example.gdn");
}

void check_functions(const Context& context, const Component& component) {
  Context own = context_of(context, component);
  const Mixer mixer(own);
  const graft_mixer_vtbl& table = *mixer.get()->v;
  const auto require = [&](bool promised, bool there, const char* promise, const char* function) {
    if (promised && !there) fail(label(component), ": ", promise, ", and ", function, " is NULL");
  };
  const char* const always = "every mixer has these functions";
  require(true, table.destroy != nullptr, always, "destroy");
  require(true, table.param_specs != nullptr, always, "param_specs");
  require(true, table.plan != nullptr, always, "plan");
  require(true, table.forward != nullptr, always, "forward");
  require(component.has(GRAFT_CAP_BACKWARD),
          GRAFT_HAS(graft_mixer_vtbl, &table, backward) && table.backward != nullptr,
          "claims GRAFT_CAP_BACKWARD", "backward");
  require(component.has(GRAFT_CAP_STEP),
          GRAFT_HAS(graft_mixer_vtbl, &table, step) && table.step != nullptr,
          "claims GRAFT_CAP_STEP", "step");
}

void check_component(Context& context, const Component& component) {
  const graft_desc& desc = *component.desc;
  const std::string whose = label(component);
  check_id(whose, desc.id);
  check_version(whose, desc.version);
  check_licence(whose, desc.license);
  for (const auto& [what, given] : {std::pair("alias", desc.alias),
                                    {"name", desc.name},
                                    {"version", desc.version},
                                    {"license", desc.license}}) {
    if (text(given).empty()) context.note(whose, " has no ", what);
  }
  if (component.kind != Kind::mixer) return;
  if (desc.n_dtypes == 0 || desc.dtypes == nullptr) fail(whose, " declares no dtype");
  if (desc.n_devices == 0 || desc.devices == nullptr) fail(whose, " declares no device");
  check_functions(context, component);
}

std::string value_text(const graft_value& value) {
  std::string out = sdk::cat(value.type, ":", value.count, ":");
  if (value.type == GRAFT_STRING) return out + text(value.u.s);
  for (std::uint32_t i = 0; i < value.count; ++i) {
    if (value.type == GRAFT_BOOL || value.type == GRAFT_INT) out += sdk::cat(value.u.i, ",");
    if (value.type == GRAFT_FLOAT) out += sdk::cat(value.u.f, ",");
    if (value.type == GRAFT_INT_LIST) out += sdk::cat(value.u.il[i], ",");
    if (value.type == GRAFT_FLOAT_LIST) out += sdk::cat(value.u.fl[i], ",");
  }
  return out;
}

// Everything a descriptor says, to compare two readings.
std::string everything(const graft_desc& desc) {
  std::string out;
  for (const char* const s : {desc.id, desc.alias, desc.name, desc.version, desc.license,
                              desc.citation, desc.description})
    out += text(s) + "\n";
  out += sdk::cat(desc.caps, " ", desc.struct_size, "\n");
  for (const graft_option* const option : schema_of(desc)) {
    out += sdk::cat(text(option->key), " ", option->flags, " ", text(option->doc), " ",
                    value_text(option->def), " ", value_text(option->min), " ",
                    value_text(option->max));
    for (const char* const* one = option->one_of; one != nullptr && *one != nullptr; ++one)
      out += sdk::cat(" ", *one);
    out += "\n";
  }
  for (std::uint32_t i = 0; i < desc.n_dtypes; ++i) out += sdk::dtype_name(desc.dtypes[i]) + " ";
  for (std::uint32_t i = 0; i < desc.n_devices; ++i)
    out += sdk::cat(static_cast<int>(desc.devices[i]), " ");
  return out;
}

void descriptors(Context& context) {
  const graft_plugin& plugin = context.library.plugin();
  check_id("the library", plugin.id);
  check_version("the library", plugin.version);
  check_licence("the library", plugin.license);
  const std::string tags = build_tags_problem(text(plugin.build_tags));
  if (!tags.empty()) fail("the library: build_tags '", plugin.build_tags, "' ", tags);
  std::set<std::string> ids;
  std::vector<std::string> first;
  const std::vector<Component> components = context.library.components();
  if (components.empty()) fail("has no component: no factory, or factories of nothing");
  for (const Component& component : components) {
    check_component(context, component);
    if (!ids.insert(label(component)).second)
      fail("has ", label(component), " twice; ids are unique among components of a kind");
    first.push_back(everything(*component.desc));
  }
  const std::vector<Component> again = context.library.components();
  for (std::size_t i = 0; i < components.size(); ++i) {
    if (again.size() != components.size() || everything(*again[i].desc) != first[i])
      fail(label(components[i]), ": its descriptor reads differently the second time");
  }
}

// ---------------------------------------------------------------- sidecar

void check_said(const char* key, const std::optional<std::string>& said, const std::string& is) {
  if (said && *said != is)
    fail("the sidecar says ", key, " = '", *said, "', the library '", is, "'; write it anew");
}

std::uint32_t parse_abi(const char* key, const std::string& given) {
  unsigned major = 0, minor = 0;
  if (std::sscanf(given.c_str(), "%u.%u", &major, &minor) != 2)
    fail("the sidecar's ", key, " '", given, "' is no version like 1.0");
  return GRAFT_ABI(major, minor);
}

// The host leaves a library closed until one of the sidecar's aliases is asked for.
void check_aliases(const std::vector<std::string>& said, const std::vector<Component>& components) {
  std::set<std::string> have;
  for (const Component& component : components) {
    if (!text(component.desc->alias).empty()) have.insert(component.desc->alias);
  }
  const std::set<std::string> listed(said.begin(), said.end());
  for (const std::string& alias : listed) {
    if (!have.contains(alias))
      fail("the sidecar lists the alias '", alias, "', which no component has");
  }
  for (const std::string& alias : have) {
    if (!listed.contains(alias))
      fail("the sidecar does not list the alias '", alias, "': a host would not find it");
  }
}

void sidecar(Context& context) {
  const Library& library = context.library;
  const std::optional<Sidecar> beside = sidecar_of(library.file());
  if (!beside) skip("there is no ", library.file().stem().string(), ".graftplugin.toml beside it");
  const graft_plugin& plugin = library.plugin();
  check_said("id", beside->id, text(plugin.id));
  check_said("license", beside->license, text(plugin.license));
  check_said("build_tags", beside->build_tags, text(plugin.build_tags));
  if (beside->abi_min && library.abi() < parse_abi("abi_min", *beside->abi_min))
    fail("the sidecar says abi_min = '", *beside->abi_min, "', the library speaks ",
         abi_text(library.abi()));
  if (beside->abi_max && library.abi() > parse_abi("abi_max", *beside->abi_max))
    fail("the sidecar says abi_max = '", *beside->abi_max, "', the library speaks ",
         abi_text(library.abi()));
  if (beside->aliases) check_aliases(*beside->aliases, library.components());
  if (beside->sha256) {
    const std::string sum = sha256(read_bytes(library.file()));
    if (*beside->sha256 != sum)
      fail("the sidecar describes another file: it says sha256 ", *beside->sha256,
           ", this one has ", sum);
  }
}

// ---------------------------------------------------------------- silence

// What is written to stdout and stderr while it lives, by C, C++ or the system.
class Capture {
 public:
  Capture() : memory_(::memfd_create("captured", MFD_CLOEXEC)) {
    std::fflush(nullptr);
    for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
      saved_.push_back(::dup(fd));
      ::dup2(memory_, fd);
    }
  }
  ~Capture() {
    std::fflush(nullptr);
    ::dup2(saved_[0], STDOUT_FILENO);
    ::dup2(saved_[1], STDERR_FILENO);
    for (const int fd : {saved_[0], saved_[1], memory_}) ::close(fd);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  std::string text() const {
    std::fflush(nullptr);
    char buffer[400];
    const ssize_t n = ::pread(memory_, buffer, sizeof buffer, 0);
    return std::string(buffer, n > 0 ? static_cast<std::size_t>(n) : 0);
  }

 private:
  int memory_;
  std::vector<int> saved_;
};

// Opening came before the test. Its child's stdout is a memory file of its own, empty at the start.
bool printed_before() {
  std::fflush(nullptr);
  std::error_code ignored;
  const auto target = std::filesystem::read_symlink("/proc/self/fd/1", ignored).string();
  return target.starts_with("/memfd:printed") && ::lseek(STDOUT_FILENO, 0, SEEK_END) > 0;
}

void silent(Context& context) {
  if (printed_before()) fail("prints while it is opened; a plugin speaks through host->log");
  const Capture capture;
  use_all(context);
  const std::string printed = capture.text();
  if (!printed.empty()) fail("prints '", printed, "'; a plugin speaks through host->log");
}

// ---------------------------------------------------------------- the process around it

void leaves_process_alone(Context& context) {
  const Library::Opening& opening = context.library.opening();
  const std::string by_opening = changes(opening.before, opening.initialized);
  if (!by_opening.empty()) fail("opening it changes ", by_opening);
  if (opening.initialized.threads != opening.loaded.threads)
    fail("negotiation and init start ", opening.initialized.threads - opening.loaded.threads,
         " threads; plugins use " GRAFT_HOST_EXT_PARALLEL);
  use_all(context);
  const std::string by_use = changes(opening.initialized, process_state());
  if (!by_use.empty()) fail("its use changes ", by_use);
  // The first use may start the threads of a runtime (OpenMP, LibTorch); later ones add none.
  const int threads = count_own("task");
  use_all(context);
  use_all(context);
  if (count_own("task") > threads)
    fail("two more uses leave ", count_own("task") - threads,
         " more threads; an instance's end with destroy()");
}

}  // namespace

std::vector<Test> library_tests() {
  return {
      {"library.negotiation", Kind::library,
       "Negotiation picks an ABI both speak, refuses others with a message, and is quick.",
       negotiation},
      {"library.one_symbol", Kind::library,
       "The file exports graft_plugin_negotiate and nothing else.", one_symbol},
      {"library.init_counted", Kind::library,
       "Components can be used until the last of several deinit calls.", init_counted},
      {"library.unknown_extensions", Kind::library,
       "An extension id that is not known, or not quite, gives NULL.", unknown_extensions},
      {"library.descriptors", Kind::library,
       "Ids, versions, licences, build tags and capabilities are well-formed and stay the same.",
       descriptors},
      {"library.sidecar", Kind::library,
       "What the .graftplugin.toml beside the file says is true of it.", sidecar},
      {"library.silent", Kind::library, "Nothing is written to stdout or stderr.", silent},
      {"library.leaves_process_alone", Kind::library,
       "Signal handlers, floating-point mode, locale, environment and the like stay as they were.",
       leaves_process_alone},
  };
}

}  // namespace graft::conformance
