// The attention block an initializer starts from, with random parameters, computed as it is
// defined.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kit/mixer.h"
#include "kit/random.h"
#include "kit/tensor.h"

namespace graft::conformance {

// A parameter with what a host says of it.
struct NamedParameter {
  std::string name, role, axes, domain;
  std::int32_t heads = 0, head_dim = 0;
  Tensor value;  // float32
};

struct Signal {
  std::string name, axes;
  Tensor value;  // float32
};

class Teacher {
 public:
  Teacher(const Layer& layer, Random& random);
  // The same function with each key-value head repeated for its queries. `wide`: `layer` with as
  // many key-value heads as heads.
  Teacher ungrouped(const Layer& wide) const;

  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  // All of GRAFT_SIGNAL_* for random text: x = RMSNorm(h) with h a random stream, residual = h + y.
  std::vector<Signal> read(std::int64_t sequences, std::int64_t tokens, Random& random) const;

 private:
  // Row by row of one sequence; probs is [H,T,T].
  struct Sequence {
    std::vector<std::vector<double>> x, context, y, residual;
    std::vector<double> probs;
  };

  explicit Teacher(const Layer& layer) : layer_(layer) {}
  Sequence one_sequence(std::int64_t tokens, Random& random) const;
  // context and probs from the rows of q, k and v.
  void mix(const std::vector<std::vector<double>>& q, const std::vector<std::vector<double>>& k,
           const std::vector<std::vector<double>>& v, Sequence& out) const;
  const Tensor* find(const char* role) const;
  std::vector<double> project(const std::vector<double>& x, const char* role,
                              const char* bias) const;
  // Of the heads of one token, in place.
  void normalise(std::vector<double>& heads, const char* role) const;
  void rotate(std::vector<double>& heads, std::int64_t position) const;

  const Layer& layer_;
  std::vector<NamedParameter> parameters_;
};

}  // namespace graft::conformance
