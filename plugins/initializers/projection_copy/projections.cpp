#include "plugins/initializers/projection_copy/projections.h"

#include <algorithm>
#include <array>

namespace graft::projections {
namespace {

using sdk::cat;
using sdk::NamedTensor;
using sdk::Status;
using sdk::StudentParam;

constexpr std::array kProjections = {GRAFT_ROLE_QUERY, GRAFT_ROLE_KEY, GRAFT_ROLE_VALUE,
                                     GRAFT_ROLE_OUTPUT};
constexpr std::array kBiases = {GRAFT_ROLE_QUERY_BIAS, GRAFT_ROLE_KEY_BIAS, GRAFT_ROLE_VALUE_BIAS,
                                GRAFT_ROLE_OUTPUT_BIAS};

[[noreturn]] void mismatch(const NamedTensor& from, const NamedTensor& to, const std::string& what,
                           const std::string& expected, const std::string& got) {
  throw Status(GRAFT_FAILED_PRECONDITION, cat("role:", from.role()),
               cat("expected ", what, " ", expected, " as in the teacher's ", from.name(), ", got ",
                   got, " in the mixer's ", to.name(),
                   "; copying changes no sizes: give the mixer the teacher's"));
}

void require_equal(const NamedTensor& from, const NamedTensor& to, const char* what,
                   int64_t expected, int64_t got) {
  if (expected != got) mismatch(from, to, what, cat(expected), cat(got));
}

void require_shape(const NamedTensor& from, const NamedTensor& to, std::vector<int64_t> shape) {
  if (!std::ranges::equal(shape, to.shape())) {
    mismatch(from, to, "shape", sdk::shape_string(shape), sdk::shape_string(to.shape()));
  }
}

// Rows of whole heads, [heads * head_dim, ...]: each teacher head goes to `repeats` heads of the
// mixer.
void copy_head_rows(const NamedTensor& from, const StudentParam& to, bool may_repeat) {
  require_equal(from, to, "head_dim", from.head_dim(), to.head_dim());
  if (!may_repeat || from.heads() <= 0 || to.heads() % from.heads() != 0) {
    require_equal(from, to, "heads", from.heads(), to.heads());
  }
  std::vector<int64_t> shape(from.shape().begin(), from.shape().end());
  shape.at(0) = int64_t{to.heads()} * to.head_dim();
  require_shape(from, to, shape);
  const std::span<const float> source = from.values();
  const std::span<float> target = to.write();
  if (source.empty()) return;
  const std::size_t head = source.size() / static_cast<std::size_t>(from.heads());
  const auto repeats = static_cast<std::size_t>(to.heads() / from.heads());
  for (std::size_t at = 0, h = 0; at < target.size(); at += head, ++h) {
    std::ranges::copy(source.subspan(h / repeats * head, head),
                      target.begin() + static_cast<std::ptrdiff_t>(at));
  }
}

// The output projection, whose heads lie along the columns, and its bias.
void copy_whole(const NamedTensor& from, const StudentParam& to) {
  if (from.role() == GRAFT_ROLE_OUTPUT) {
    require_equal(from, to, "heads", from.heads(), to.heads());
    require_equal(from, to, "head_dim", from.head_dim(), to.head_dim());
  }
  require_shape(from, to, {from.shape().begin(), from.shape().end()});
  std::ranges::copy(from.values(), to.write().begin());
}

void copy_norm(const NamedTensor& from, const StudentParam& to) {
  const std::span<const float> source = from.values();
  const int64_t given = sdk::numel(from.tensor()), wanted = sdk::numel(to.tensor());
  if (given == 0 || wanted % given != 0) require_equal(from, to, "size", given, wanted);
  const std::span<float> target = to.write();
  for (std::size_t i = 0; i < target.size(); ++i) target[i] = source[i % source.size()];
}

void copy_parameter(const NamedTensor& from, const StudentParam& to) {
  const std::string_view role = from.role();
  if (role == GRAFT_ROLE_OUTPUT || role == GRAFT_ROLE_OUTPUT_BIAS) return copy_whole(from, to);
  if (role == GRAFT_ROLE_QUERY_NORM || role == GRAFT_ROLE_KEY_NORM) return copy_norm(from, to);
  const bool is_query = role == GRAFT_ROLE_QUERY || role == GRAFT_ROLE_QUERY_BIAS;
  copy_head_rows(from, to, /*may_repeat=*/!is_query);
}

bool is_copied(std::string_view role) {
  return std::ranges::find(kProjections, role) != kProjections.end() ||
         std::ranges::find(kBiases, role) != kBiases.end() || role == GRAFT_ROLE_QUERY_NORM ||
         role == GRAFT_ROLE_KEY_NORM;
}

}  // namespace

void need_projections(sdk::RoleNeeds& needs) {
  for (const char* role : kProjections) {
    needs.teacher(role);
    needs.student(role);
  }
}

void copy_projections(const sdk::InitArgs& args) {
  for (const char* role : kProjections) {
    args.teacher(role);
    args.student(role);
  }
  for (const NamedTensor& from : args.teacher()) {
    const StudentParam* const to = args.find_student(from.role());
    if (is_copied(from.role()) && to != nullptr) {
      copy_parameter(from, *to);
    } else {
      sdk::log(GRAFT_LOG_WARN, cat("layer ", args.layer().layer, ": the teacher's ", from.name(),
                                   " (", from.role(), ") has no place in the mixer: dropped"));
    }
  }
  for (const char* role : kBiases) {
    const StudentParam* const to = args.find_student(role);
    if (to != nullptr && args.find_teacher(role) == nullptr) std::ranges::fill(to->write(), 0.0F);
  }
}

}  // namespace graft::projections
