#include "core/abi/host_services.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <string_view>

#include "core/abi/strict.h"
#include "graft/version.h"

namespace graft {
namespace {

constexpr std::uint64_t kLeastAlignment = 64;

void* allocate(const graft_host*, DLDevice device, void*, std::uint64_t bytes,
               std::uint64_t align) {
  if (device.device_type != kDLCPU) return nullptr;
  align = std::max(align, kLeastAlignment);
  if (!std::has_single_bit(align) || bytes > std::numeric_limits<std::size_t>::max() - align) {
    return nullptr;
  }
  // aligned_alloc wants a whole number of alignments; an empty buffer still has an address.
  const std::uint64_t rounded = std::max((bytes + align - 1) / align, std::uint64_t{1}) * align;
  return std::aligned_alloc(align, rounded);
}

void release(const graft_host*, DLDevice, void*, void* p) { std::free(p); }

std::int32_t one_thread(const graft_host*) { return 1; }

void serial_for(const graft_host*, std::int64_t begin, std::int64_t end, std::int64_t,
                void (*body)(void*, std::int64_t, std::int64_t, std::int32_t), void* arg) {
  if (begin < end) body(arg, begin, end, 0);
}

// How many leases there are for each plugin id.
struct Leases {
  std::mutex mutex;
  std::map<std::string, int> count;
  // Never destroyed: a plugin may call the host from its static destructors.
  static Leases& all() {
    static Leases& leases = *new Leases;
    return leases;
  }
};

constexpr graft_host_memory kMemory{sizeof(graft_host_memory), 0, &allocate, &release};
constexpr graft_host_parallel kSerial{sizeof(graft_host_parallel), 0, &one_thread, &serial_for};

spdlog::level::level_enum spdlog_level(std::int32_t level) {
  switch (level) {
    case GRAFT_LOG_TRACE:
      return spdlog::level::trace;
    case GRAFT_LOG_DEBUG:
      return spdlog::level::debug;
    case GRAFT_LOG_INFO:
      return spdlog::level::info;
    case GRAFT_LOG_WARN:
    case GRAFT_LOG_PLUGIN_MISBEHAVING:
      return spdlog::level::warn;
    default:
      return spdlog::level::err;
  }
}

}  // namespace

struct HostServices::Shared {
  struct Face {
    graft_host c;
    std::string label;
    Shared* shared;
  };

  Settings settings;
  std::atomic<bool> closed{false};
  std::mutex mutex;
  std::deque<Face> faces;

  static const Face& face(const graft_host* host) { return *static_cast<const Face*>(host->ctx); }

  // In strict mode: says when a plugin calls the host that has been told goodbye to.
  static void check_lease(const graft_host* host, const char* service) noexcept {
    if (!strict_mode()) return;
    if (host == nullptr) return spdlog::warn("a plugin calls {} without its host (NULL)", service);
    Leases& leases = Leases::all();
    const std::lock_guard<std::mutex> lock(leases.mutex);
    const std::string& plugin = face(host).label;
    if (leases.count[plugin] > 0) return;
    spdlog::warn("{}: the plugin misbehaves: calls the host's {} after its last deinit", plugin,
                 service);
  }

  static void log(const graft_host* host, std::int32_t level, const char* message) noexcept {
    check_lease(host, "log");
    const char* blame = "";
    if (level == GRAFT_LOG_PLUGIN_MISBEHAVING) blame = "the plugin misbehaves: ";
    if (level == GRAFT_LOG_HOST_MISBEHAVING) blame = "the host misbehaves: ";
    // spdlog keeps its exceptions to itself.
    spdlog::log(spdlog_level(level), "{}: {}{}", face(host).label, blame,
                message == nullptr ? "(no text)" : message);
  }

  static std::int32_t should_stop(const graft_host* host) noexcept {
    check_lease(host, "should_stop");
    const Shared& shared = *face(host).shared;
    if (shared.closed.load() || !shared.settings.should_stop) return 0;
    try {
      return shared.settings.should_stop() ? 1 : 0;
    } catch (...) {
      return 0;
    }
  }

  static const void* get_extension(const graft_host* host, const char* id) noexcept {
    check_lease(host, "get_extension");
    const Shared& shared = *face(host).shared;
    const void* const found = shared.extension(id);
    return found != nullptr && strict_mode() ? checked(found, shared) : found;
  }

  // The tables with a look at the lease before each call.
  static const void* checked(const void* found, const Shared& shared) noexcept {
    if (found == shared.settings.blas) return &kCheckedBlas;
    if (found != &kMemory) return &kCheckedParallel;
    return found;  // memory may be given back after the end
  }
  static const graft_host_blas& blas(const graft_host* host) {
    return *face(host).shared->settings.blas;
  }
  static const graft_host_parallel& parallel(const graft_host* host) {
    const graft_host_parallel* const given = face(host).shared->settings.parallel;
    return given != nullptr ? *given : kSerial;
  }
  static const graft_host_blas kCheckedBlas;
  static const graft_host_parallel kCheckedParallel;

  const void* extension(const char* id) const noexcept {
    if (id == nullptr) return nullptr;
    const std::string_view wanted = id;
    // Memory may be given back after the end; the rest is not there any more.
    if (wanted == GRAFT_HOST_EXT_MEMORY) return &kMemory;
    if (closed.load()) return nullptr;
    if (wanted == GRAFT_HOST_EXT_PARALLEL) {
      return settings.parallel != nullptr ? settings.parallel : &kSerial;
    }
    if (wanted == GRAFT_HOST_EXT_BLAS) return settings.blas;
    return nullptr;
  }
};

const graft_host_blas HostServices::Shared::kCheckedBlas{
    sizeof(graft_host_blas), 0,
    [](const graft_host* host, std::int32_t trans_a, std::int32_t trans_b, double alpha,
       const DLTensor* a, const DLTensor* b, double beta, DLTensor* c, void* stream,
       graft_error* error) {
      check_lease(host, "host-blas.gemm");
      return blas(host).gemm(host, trans_a, trans_b, alpha, a, b, beta, c, stream, error);
    },
    [](const graft_host* host, const DLTensor* a, DLTensor* x, void* stream, graft_error* error) {
      check_lease(host, "host-blas.spd_solve");
      return blas(host).spd_solve(host, a, x, stream, error);
    }};

const graft_host_parallel HostServices::Shared::kCheckedParallel{
    sizeof(graft_host_parallel), 0,
    [](const graft_host* host) {
      check_lease(host, "host-parallel.num_threads");
      return parallel(host).num_threads(host);
    },
    [](const graft_host* host, std::int64_t begin, std::int64_t end, std::int64_t grain,
       void (*body)(void*, std::int64_t, std::int64_t, std::int32_t), void* arg) {
      check_lease(host, "host-parallel.parallel_for");
      parallel(host).parallel_for(host, begin, end, grain, body, arg);
    }};

HostServices::HostServices(Settings settings) {
  if (settings.version.empty()) settings.version = GRAFT_VERSION_STRING;
  if (settings.build_tags.empty()) settings.build_tags = host_build_tags();
  // A plugin counts its init calls but cannot know which host a deinit belongs to: it may hold any
  // host it was ever given, so none is freed. The list keeps them reachable for leak checkers.
  static std::mutex mutex;
  static auto& all = *new std::deque<Shared>;
  const std::lock_guard<std::mutex> lock(mutex);
  shared_ = &all.emplace_back();
  shared_->settings = std::move(settings);
}

HostServices::~HostServices() { shared_->closed.store(true); }

const std::string& HostServices::name() const { return shared_->settings.name; }
const std::string& HostServices::version() const { return shared_->settings.version; }
const std::string& HostServices::build_tags() const { return shared_->settings.build_tags; }
const AbiRange& HostServices::abi() const { return shared_->settings.abi; }

const graft_host* HostServices::c_host(const std::string& label, std::uint32_t abi) {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  auto& face = shared_->faces.emplace_back();
  face.label = label;
  face.shared = shared_;
  face.c = {sizeof(graft_host),
            abi,
            name().c_str(),
            version().c_str(),
            &face,
            &Shared::log,
            &Shared::should_stop,
            &Shared::get_extension};
  return &face.c;
}

const void* HostServices::extension(const char* id) const { return shared_->extension(id); }

HostLease::HostLease(std::string plugin_id) : plugin_id_(std::move(plugin_id)) {
  Leases& leases = Leases::all();
  const std::lock_guard<std::mutex> lock(leases.mutex);
  ++leases.count[plugin_id_];
}

HostLease::~HostLease() {
  Leases& leases = Leases::all();
  const std::lock_guard<std::mutex> lock(leases.mutex);
  --leases.count[plugin_id_];
}

std::string host_build_tags() { return GRAFT_HOST_BUILD_TAGS; }

namespace {

std::map<std::string, std::string> parsed_tags(const std::string& text) {
  std::map<std::string, std::string> tags;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(';', begin), text.size());
    const std::string tag = text.substr(begin, end - begin);
    const std::size_t equals = tag.find('=');
    if (equals != std::string::npos) tags[tag.substr(0, equals)] = tag.substr(equals + 1);
    begin = end + 1;
  }
  return tags;
}

}  // namespace

std::string build_tags_conflict(const std::string& plugin, const std::string& host) {
  const auto of_host = parsed_tags(host);
  std::string conflict;
  for (const auto& [key, value] : parsed_tags(plugin)) {
    // Compilers of one ABI may be mixed; what LibTorch was built as may not.
    const auto other = of_host.find(key);
    if (key == "compiler" || other == of_host.end() || other->second == value) continue;
    conflict += (conflict.empty() ? "" : "; ") + key + "=" + value + ", but this graft has " + key +
                "=" + other->second;
  }
  return conflict;
}

}  // namespace graft
