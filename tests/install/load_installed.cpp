// load_installed FOLDER ALIAS...: opens every plugin in the folder, makes each mixer and runs it on
// three tokens.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "core/loader/registry.h"

namespace {

struct alignas(64) Tokens {
  float values[16] = {1, 2, 3, 4, 5, 6};
};

template <class Struct>
Struct sized() {
  Struct s{};
  s.struct_size = sizeof s;
  return s;
}

// The sum of the mixer's output for x = 1 ... 6 as [1,3,2].
double run(graft::Mixer& mixer) {
  auto plan = sized<graft_plan_in>();
  plan.device_type = kDLCPU;
  plan.dtype = {kDLFloat, 32, 1};
  plan.batch = 1;
  plan.tokens = 3;
  mixer.plan(plan);

  std::int64_t shape[] = {1, 3, 2}, strides[] = {6, 2, 1};
  Tokens in, out, param;
  DLTensor x{in.values, {kDLCPU, 0}, 3, {kDLFloat, 32, 1}, shape, strides, 0};
  DLTensor y = x, p = x;
  y.data = out.values;
  p.data = param.values;
  std::int64_t one = 1;
  p.ndim = 1;
  p.shape = p.strides = &one;
  const std::vector<const DLTensor*> params(mixer.param_specs().size(), &p);
  auto call = sized<graft_mixer_forward>();
  call.x = &x;
  call.y = &y;
  call.n_params = static_cast<std::uint32_t>(params.size());
  call.params = params.data();
  auto exec = sized<graft_exec>();
  exec.device_type = kDLCPU;
  mixer.forward(exec, call);
  double sum = 0;
  for (int i = 0; i < 6; ++i) sum += out.values[i];
  return sum;
}

}  // namespace

int main(int argc, char** argv) try {
  graft::HostServices host;
  graft::PluginRegistry registry({argv[1]}, host);
  registry.scan();
  for (const auto& refused : registry.refused())
    std::printf("refused: %s\n", refused.cause.c_str());
  if (!registry.refused().empty() || argc < 3) return 1;
  auto layer = sized<graft_layer_info>();
  layer.model_dim = 2;
  for (int i = 2; i < argc; ++i) {
    const auto mixer = registry.create_mixer(argv[i], layer);
    std::printf("%s: %g\n", argv[i], run(*mixer));
  }
  return 0;
} catch (const std::exception& error) {
  std::printf("%s\n", error.what());
  return 1;
}
