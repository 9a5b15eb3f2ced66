// What is wrong with a call, found before anything is launched: "" or a sentence that names it.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "gdn_cuda.h"
#include "linear_cuda.h"

namespace graft::cuda {

// The grid's limit on y and z.
inline constexpr int kMostHeads = 65535;

// Each pointer that must not be null, by name.
using Pointers = std::initializer_list<std::pair<const char*, const void*>>;

inline std::string missing(const char* call, Pointers pointers) {
  for (const auto& [name, data] : pointers) {
    if (data == nullptr) return std::string(call) + ": `" + name + "` is null; it must be given";
  }
  return "";
}

inline std::string size_problem(const char* call, const char* name, int64_t value, int64_t least,
                                int64_t most) {
  if (value >= least && value <= most) return "";
  return std::string(call) + ": `" + name + "` is " + std::to_string(value) + "; it goes from " +
         std::to_string(least) + " to " + std::to_string(most);
}

inline std::string first_of(std::initializer_list<std::string> problems) {
  for (const std::string& problem : problems) {
    if (!problem.empty()) return problem;
  }
  return "";
}

inline constexpr int64_t kMostTokens = int64_t{1} << 30;
inline constexpr int kMostColumns = 1 << 20;

inline std::string shape_problem(const char* call, const GdnShape& s) {
  return first_of({size_problem(call, "batch", s.batch, 1, kMostHeads),
                   size_problem(call, "heads", s.heads, 1, kMostHeads),
                   size_problem(call, "tokens", s.tokens, 0, kMostTokens),
                   size_problem(call, "key_dim", s.key_dim, 1, kMostColumns),
                   size_problem(call, "value_dim", s.value_dim, 1, kMostColumns)});
}

// Without tokens only states are touched.
template <class E>
std::string problem_of(const GdnShape& s, const GdnForward<E>& io) {
  const char* const call = "gdn_forward";
  std::string problem = shape_problem(call, s);
  if (!problem.empty() || s.tokens == 0) return problem;
  return missing(call, {{"q", io.q.data},
                        {"k", io.k.data},
                        {"v", io.v.data},
                        {"o", io.o.data},
                        {"borders", io.borders},
                        {"err", io.err},
                        {"scratch", io.scratch}});
}
template <class E>
std::string problem_of(const GdnShape& s, const GdnBackward<E>& io) {
  const char* const call = "gdn_backward";
  std::string problem = shape_problem(call, s);
  if (!problem.empty() || s.tokens == 0) return problem;
  return missing(call, {{"q", io.q.data},
                        {"k", io.k.data},
                        {"d_o", io.d_o.data},
                        {"dq", io.dq.data},
                        {"dk", io.dk.data},
                        {"dv", io.dv.data},
                        {"borders", io.borders},
                        {"err", io.err},
                        {"scratch", io.scratch}});
}
template <class E>
std::string problem_of(const GdnShape& s, const GdnStep<E>& io) {
  const char* const call = "gdn_step";
  std::string problem = shape_problem(call, s);
  if (problem.empty()) problem = missing(call, {{"state_out", io.state_out}});
  if (!problem.empty() || s.tokens == 0) return problem;
  return missing(call, {{"q", io.q.data}, {"k", io.k.data}, {"v", io.v.data}, {"o", io.o.data}});
}

inline std::string shape_problem(const char* call, const LinearShape& s) {
  const std::string sizes =
      first_of({size_problem(call, "batch", s.batch, 1, kMostHeads),
                size_problem(call, "heads", s.heads, 1, kMostHeads),
                size_problem(call, "tokens", s.tokens, 0, kMostTokens),
                size_problem(call, "head_dim", s.head_dim, 1, kMostColumns),
                size_problem(call, "features", s.features, 1, kMostColumns),
                size_problem(call, "value_dim", s.value_dim, 1, kMostColumns)});
  if (!sizes.empty()) return sizes;
  if (s.maps && s.features % 2 != 0)
    return std::string(call) + ": `features` is " + std::to_string(s.features) +
           "; a feature map has two for each row of its weight";
  if (!s.maps && s.features != s.head_dim)
    return std::string(call) + ": `head_dim` is " + std::to_string(s.head_dim) +
           " and `features` " + std::to_string(s.features) +
           "; without feature maps they are the same";
  return "";
}

inline std::string missing_maps(const char* call, const LinearShape& s, const FeatureMaps& maps) {
  if (!s.maps) return "";
  return missing(call, {{"maps.weight_q", maps.weight_q}, {"maps.weight_k", maps.weight_k}});
}

template <class E>
std::string problem_of(const LinearShape& s, const LinearForward<E>& io) {
  const char* const call = "linear_forward";
  std::string problem = shape_problem(call, s);
  if (!problem.empty() || s.tokens == 0) return problem;
  return first_of({missing(call, {{"q", io.q.data},
                                  {"k", io.k.data},
                                  {"v", io.v.data},
                                  {"o", io.o.data},
                                  {"borders", io.borders},
                                  {"scratch", io.scratch}}),
                   s.normalise ? missing(call, {{"norm", io.norm}}) : "",
                   missing_maps(call, s, io.maps)});
}
template <class E>
std::string problem_of(const LinearShape& s, const LinearBackward<E>& io) {
  const char* const call = "linear_backward";
  std::string problem = shape_problem(call, s);
  if (!problem.empty() || s.tokens == 0) return problem;
  return first_of({missing(call, {{"q", io.q.data},
                                  {"k", io.k.data},
                                  {"v", io.v.data},
                                  {"d_o", io.d_o.data},
                                  {"dq", io.dq.data},
                                  {"dk", io.dk.data},
                                  {"dv", io.dv.data},
                                  {"borders", io.borders},
                                  {"scratch", io.scratch}}),
                   s.normalise ? missing(call, {{"norm", io.norm}, {"o", io.o.data}}) : "",
                   missing_maps(call, s, io.maps)});
}
template <class E>
std::string problem_of(const LinearShape& s, const LinearStep<E>& io) {
  const char* const call = "linear_step";
  std::string problem = shape_problem(call, s);
  if (problem.empty())
    problem = missing(call, {{"state_out", io.state_out}, {"scratch", io.scratch}});
  if (!problem.empty() || s.tokens == 0) return problem;
  return first_of(
      {missing(call, {{"q", io.q.data}, {"k", io.k.data}, {"v", io.v.data}, {"o", io.o.data}}),
       missing_maps(call, s, io.maps)});
}

}  // namespace graft::cuda
