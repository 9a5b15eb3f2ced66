#include "core/cuda/devices.h"

#include <gtest/gtest.h>

namespace graft::cuda {
namespace {

TEST(CudaDevices, EitherThereAreSomeOrItSaysWhyNot) {
  const auto all = devices();
  EXPECT_EQ(all.empty(), !why_no_device().empty()) << why_no_device();
  for (const Device& device : all) {
    EXPECT_FALSE(device.name.empty());
    EXPECT_GE(device.major, 8) << device.name;
    EXPECT_GT(device.processors, 0) << device.name;
    EXPECT_GT(device.memory_gib, 0) << device.name;
  }
  if (all.empty()) GTEST_LOG_(INFO) << why_no_device();
}

}  // namespace
}  // namespace graft::cuda
