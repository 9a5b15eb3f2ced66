#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/base/testing.h"
#include "core/checkpoint/safetensors.h"

namespace graft {
namespace {

using testing::ElementsAre;

struct FormatCase {
  DType dtype;
  std::uint64_t largest;       // the finite value of the largest exponent and mantissa
  std::uint64_t infinity;      // not in F8_E4M3
  std::uint64_t least_nan;     // infinity's bits and the lowest of the mantissa
  std::uint64_t greatest_nan;  // all bits
};

class EveryFloat : public testing::TestWithParam<FormatCase> {
 protected:
  // `count` elements with the largest finite value, one byte away from alignment.
  TensorView tensor(std::vector<std::int64_t> shape) {
    TensorView view;
    view.dtype = GetParam().dtype;
    view.shape = std::move(shape);
    view.bytes = static_cast<std::uint64_t>(element_count(view)) * size_of(view.dtype);
    storage_.assign(view.bytes + 1, std::byte{0});
    view.data = storage_.data() + 1;
    for (std::int64_t i = 0; i < element_count(view); ++i) set(i, GetParam().largest);
    return view;
  }
  void set(std::int64_t index, std::uint64_t bits) {
    const std::size_t size = size_of(GetParam().dtype);
    std::memcpy(storage_.data() + 1 + static_cast<std::size_t>(index) * size, &bits, size);
  }
  std::uint64_t sign() const { return std::uint64_t{1} << (8 * size_of(GetParam().dtype) - 1); }

  std::vector<std::byte> storage_;
};

TEST_P(EveryFloat, LargestFiniteValuesPass) {
  for (const std::int64_t count : {0, 1, 4095, 4096, 4097, 20'000}) {
    EXPECT_FALSE(find_non_finite(tensor({count}))) << count;
  }
  const TensorView view = tensor({3});
  set(0, GetParam().largest | sign());
  set(1, sign());
  set(2, 0);
  EXPECT_FALSE(find_non_finite(view));
}

TEST_P(EveryFloat, FindsTheFirstAtAnyPlace) {
  for (const std::int64_t place : {0, 1, 4094, 4095, 4096, 8191, 9999}) {
    for (const std::uint64_t bits : {GetParam().least_nan, GetParam().greatest_nan}) {
      const TensorView view = tensor({10'000});
      set(place, bits);
      set(9999, GetParam().greatest_nan);
      const auto found = find_non_finite(view);
      ASSERT_TRUE(found) << place;
      EXPECT_EQ(found->flat_index, place);
      EXPECT_EQ(found->value, "nan");
    }
  }
}

TEST_P(EveryFloat, TellsInfinitiesApart) {
  const TensorView view = tensor({2});
  if (GetParam().dtype == DType::F8_E4M3) {  // has none: an exponent of all ones counts on
    set(0, 0x78);
    EXPECT_FALSE(find_non_finite(view));
    return;
  }
  set(0, GetParam().infinity);
  EXPECT_EQ(find_non_finite(view)->value, "inf");
  set(0, GetParam().infinity | sign());
  EXPECT_EQ(find_non_finite(view)->value, "-inf");
}

TEST_P(EveryFloat, GivesTheIndexPerDimension) {
  const TensorView view = tensor({2, 3, 5});
  set(1 * 15 + 2 * 5 + 4, GetParam().least_nan);
  EXPECT_THAT(find_non_finite(view)->index, ElementsAre(1, 2, 4));
  const TensorView scalar = tensor({});
  set(0, GetParam().least_nan);
  EXPECT_THAT(find_non_finite(scalar)->index, ElementsAre());
}

INSTANTIATE_TEST_SUITE_P(
    Formats, EveryFloat,
    testing::Values(FormatCase{DType::F64, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000,
                               0x7FF0000000000001, 0xFFFFFFFFFFFFFFFF},
                    FormatCase{DType::F32, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0xFFFFFFFF},
                    FormatCase{DType::F16, 0x7BFF, 0x7C00, 0x7C01, 0xFFFF},
                    FormatCase{DType::BF16, 0x7F7F, 0x7F80, 0x7F81, 0xFFFF},
                    FormatCase{DType::F8_E5M2, 0x7B, 0x7C, 0x7D, 0xFF},
                    FormatCase{DType::F8_E4M3, 0x7E, 0, 0x7F, 0xFF}),
    [](const auto& info) { return std::string(name(info.param.dtype)); });

// Every value of 16 bits against the same value as a float of the language.
TEST(NonFiniteTest, EveryBf16) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto word = static_cast<std::uint16_t>(bits);
    const std::uint32_t wide = bits << 16;
    float value = 0;
    std::memcpy(&value, &wide, sizeof(value));
    const TensorView view{"x", DType::BF16, {}, reinterpret_cast<const std::byte*>(&word),
                          2,   nullptr};
    ASSERT_EQ(find_non_finite(view).has_value(), !std::isfinite(value)) << bits;
  }
}

TEST(NonFiniteTest, OtherTypesHaveNone) {
  const std::vector<std::byte> ones(64, std::byte{0xFF});
  for (const DType dtype : {DType::BOOL, DType::U8, DType::I8, DType::I16, DType::U16, DType::I32,
                            DType::U32, DType::I64, DType::U64}) {
    const auto count = static_cast<std::int64_t>(ones.size() / size_of(dtype));
    EXPECT_FALSE(find_non_finite({"x", dtype, {count}, ones.data(), ones.size(), nullptr}));
  }
}

}  // namespace
}  // namespace graft
