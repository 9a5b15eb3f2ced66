#include "core/abi/host_services.h"

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <cstdint>
#include <sstream>
#include <vector>

#include "core/base/testing.h"
#include "graft/host.hpp"
#include "graft/version.h"

namespace graft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr DLDevice kCpu{kDLCPU, 0};

template <class Table>
const Table& service(const graft_host* host, const char* id) {
  const void* const table = host->get_extension(host, id);
  EXPECT_NE(table, nullptr) << id;
  return *static_cast<const Table*>(table);
}

TEST(HostServices, SaysWhatItIs) {
  HostServices services;
  const graft_host* const host = services.c_host("org.example.x", GRAFT_ABI_CURRENT);
  EXPECT_EQ(host->struct_size, sizeof(graft_host));
  EXPECT_EQ(host->abi, GRAFT_ABI_CURRENT);
  EXPECT_STREQ(host->name, "graft");
  EXPECT_STREQ(host->version, GRAFT_VERSION_STRING);
  EXPECT_THAT(services.build_tags(), HasSubstr("libtorch="));
  EXPECT_NE(host, services.c_host("org.example.y", GRAFT_ABI_CURRENT));
}

TEST(HostServices, UnknownExtensionsAreNull) {
  HostServices services;
  const graft_host* const host = services.c_host("x", GRAFT_ABI_CURRENT);
  for (const char* id : {"", "graft.host-memory", "graft.host-memory/2", "graft.host-memory/1 ",
                         "org.example/1", GRAFT_HOST_EXT_BLAS}) {
    EXPECT_EQ(host->get_extension(host, id), nullptr) << id;
  }
  EXPECT_EQ(host->get_extension(host, nullptr), nullptr);
}

TEST(HostServices, MemoryIsAligned) {
  HostServices services;
  const graft_host* const host = services.c_host("x", GRAFT_ABI_CURRENT);
  const auto& memory = service<graft_host_memory>(host, GRAFT_HOST_EXT_MEMORY);
  for (const std::uint64_t align :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{64}, std::uint64_t{4096}}) {
    for (const std::uint64_t bytes :
         {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{63}, std::uint64_t{65}}) {
      void* const p = memory.alloc(host, kCpu, nullptr, bytes, align);
      ASSERT_NE(p, nullptr);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % std::max<std::uint64_t>(align, 64), 0u);
      memory.free(host, kCpu, nullptr, p);
    }
  }
  EXPECT_EQ(memory.alloc(host, kCpu, nullptr, 8, 96), nullptr);
  EXPECT_EQ(memory.alloc(host, kCpu, nullptr, UINT64_MAX, 64), nullptr);
  EXPECT_EQ(memory.alloc(host, {kDLCUDA, 0}, nullptr, 8, 64), nullptr);
  memory.free(host, kCpu, nullptr, nullptr);
}

TEST(HostServices, SerialUnlessGivenThreads) {
  HostServices services;
  const graft_host* const host = services.c_host("x", GRAFT_ABI_CURRENT);
  const auto& pool = service<graft_host_parallel>(host, GRAFT_HOST_EXT_PARALLEL);
  EXPECT_EQ(pool.num_threads(host), 1);
  std::vector<std::int64_t> calls;
  const auto body = [](void* arg, std::int64_t begin, std::int64_t end, std::int32_t worker) {
    auto& list = *static_cast<std::vector<std::int64_t>*>(arg);
    list.insert(list.end(), {begin, end, worker});
  };
  pool.parallel_for(host, 3, 10, 2, body, &calls);
  EXPECT_THAT(calls, ElementsAre(3, 10, 0));
  pool.parallel_for(host, 3, 3, 1, body, &calls);
  EXPECT_EQ(calls.size(), 3u);

  HostServices::Settings settings;
  static const graft_host_parallel mine{sizeof(graft_host_parallel), 0, nullptr, nullptr};
  static const graft_host_blas blas{sizeof(graft_host_blas), 0, nullptr, nullptr};
  settings.parallel = &mine;
  settings.blas = &blas;
  HostServices given(settings);
  EXPECT_EQ(given.extension(GRAFT_HOST_EXT_PARALLEL), &mine);
  EXPECT_EQ(given.extension(GRAFT_HOST_EXT_BLAS), &blas);
}

TEST(HostServices, StopIsAskedEachTime) {
  bool stop = false;
  HostServices::Settings settings;
  settings.should_stop = [&] { return stop; };
  HostServices services(settings);
  const graft_host* const host = services.c_host("x", GRAFT_ABI_CURRENT);
  EXPECT_EQ(host->should_stop(host), 0);
  stop = true;
  EXPECT_EQ(host->should_stop(host), 1);
  HostServices::Settings throwing;
  throwing.should_stop = []() -> bool { throw 1; };
  HostServices thrower(throwing);
  const graft_host* const unlucky = thrower.c_host("x", GRAFT_ABI_CURRENT);
  EXPECT_EQ(unlucky->should_stop(unlucky), 0);
}

TEST(HostServices, ALateCallFindsAHostWithoutServices) {
  const graft_host* host = nullptr;
  {
    HostServices::Settings settings;
    settings.should_stop = [] { return true; };
    HostServices services(settings);
    host = services.c_host("x", GRAFT_ABI_CURRENT);
  }
  EXPECT_EQ(host->should_stop(host), 0);
  EXPECT_EQ(host->get_extension(host, GRAFT_HOST_EXT_PARALLEL), nullptr);
  EXPECT_NE(host->get_extension(host, GRAFT_HOST_EXT_MEMORY), nullptr);
  host->log(host, GRAFT_LOG_TRACE, "still there");
}

TEST(HostServices, LogLevelsAndBlame) {
  std::ostringstream lines;
  const auto before = spdlog::default_logger();
  const auto logger = std::make_shared<spdlog::logger>(
      "t", std::make_shared<spdlog::sinks::ostream_sink_mt>(lines));
  logger->set_level(spdlog::level::trace);
  logger->set_pattern("%l %v");
  spdlog::set_default_logger(logger);
  HostServices services;
  const graft_host* const host = services.c_host("lib", GRAFT_ABI_CURRENT);
  host->log(host, GRAFT_LOG_TRACE, "a");
  host->log(host, GRAFT_LOG_WARN, "100% {} sure");
  host->log(host, GRAFT_LOG_PLUGIN_MISBEHAVING, "b");
  host->log(host, GRAFT_LOG_HOST_MISBEHAVING, "c");
  host->log(host, 99, nullptr);
  spdlog::set_default_logger(before);
  EXPECT_EQ(lines.str(),
            "trace lib: a\nwarning lib: 100% {} sure\nwarning lib: the plugin misbehaves: b\n"
            "error lib: the host misbehaves: c\nerror lib: (no text)\n");
}

// ---------------------------------------------------------------- the SDK's view of it

class SdkHost : public ::testing::Test {
 protected:
  SdkHost() { sdk::detail::current_host.store(services_.c_host("x", GRAFT_ABI_CURRENT)); }
  ~SdkHost() override { sdk::detail::current_host.store(nullptr); }
  HostServices services_;
};

TEST_F(SdkHost, BufferGivesBackWhatItTook) {
  sdk::HostBuffer a(kCpu, nullptr, 100, 256);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data()) % 256, 0u);
  sdk::HostBuffer b(std::move(a));
  EXPECT_EQ(a.data(), nullptr);
  a = std::move(b);
  EXPECT_NE(a.data(), nullptr);
  EXPECT_THROW(sdk::HostBuffer({kDLCUDA, 0}, nullptr, 8), sdk::Status);
}

TEST_F(SdkHost, ParallelForCarriesExceptions) {
  std::int64_t sum = 0;
  sdk::parallel_for(0, 10, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) sum += i;
  });
  EXPECT_EQ(sum, 45);
  EXPECT_THROW(sdk::parallel_for(0, 10, 1, [](std::int64_t, std::int64_t) { throw 7; }), int);
  sdk::parallel_for(5, 5, 1, [](std::int64_t, std::int64_t) { FAIL(); });
}

TEST_F(SdkHost, MissingServiceIsNamed) {
  DLTensor t{};
  try {
    sdk::gemm(false, false, 1, t, t, 0, t);
    FAIL();
  } catch (const sdk::Status& status) {
    EXPECT_EQ(status.code(), GRAFT_FAILED_PRECONDITION);
    EXPECT_EQ(status.where(), "host:graft.host-blas/1");
  }
}

TEST(SdkWithoutHost, DoesNothing) {
  EXPECT_EQ(sdk::host(), nullptr);
  EXPECT_FALSE(sdk::should_stop());
  sdk::log(GRAFT_LOG_ERROR, "nobody hears this");
  int calls = 0;
  sdk::parallel_for(0, 4, 1, [&](std::int64_t begin, std::int64_t end) {
    EXPECT_EQ(end - begin, 4);
    ++calls;
  });
  EXPECT_EQ(calls, 1);
}

// ---------------------------------------------------------------- build tags

TEST(BuildTags, ConflictOnlyWhereBothSpeak) {
  const std::string host = "compiler=gcc-12;cxx11abi=1;libtorch=2.11.0";
  EXPECT_EQ(build_tags_conflict("", host), "");
  EXPECT_EQ(build_tags_conflict(host, host), "");
  EXPECT_EQ(build_tags_conflict("compiler=clang-19;libtorch=2.11.0;cudart=12.6", host), "");
  EXPECT_EQ(build_tags_conflict("libtorch=2.8.0", host),
            "libtorch=2.8.0, but this graft has libtorch=2.11.0");
  EXPECT_EQ(build_tags_conflict("libtorch=2.8.0;cxx11abi=0", host),
            "cxx11abi=0, but this graft has cxx11abi=1; libtorch=2.8.0, but this graft has "
            "libtorch=2.11.0");
  EXPECT_EQ(build_tags_conflict(";;nonsense;=;libtorch", host), "");
  EXPECT_EQ(build_tags_conflict("libtorch=2.8.0", ""), "");
}

}  // namespace
}  // namespace graft
