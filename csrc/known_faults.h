// SPDX-License-Identifier: Apache-2.0
//
// Plans that cuDNN offers and that compute something else, or harm the process. They are left out
// before a plan is chosen, however it is chosen.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "conv_spec.h"

namespace jaxcudnn {

/// Where a plan would run. A number that is not known is 0, and rows are then taken to apply.
struct Target {
  size_t sm = 0;        ///< compute capability: 90 is 9.0
  size_t cudnn = 0;     ///< 91900 is 9.19.0
  size_t cublaslt = 0;  ///< 130601 is 13.6.1; some of cuDNN's engines are cuBLASLt's
};

struct Candidate {
  std::string_view name;      ///< of a plan: engine and knobs, such as "eng20_k2=6_k3=0"
  bool tensor_cores = false;  ///< its notes say TENSOR_CORE
};

/// What a call asks for that decides whether some faults matter.
struct Demands {
  bool deterministic = false;
  bool allow_reduced_precision_reduction = false;
};

enum class Fault {
  kWrongNumbers,
  kTransforms,  ///< by FFT, though its notes do not say so: neither exact nor within the error
                ///< bound
  kRoundsPartialSums,
  kNotDeterministic,
  kIllegalAccess
};

/// A property of a convolution, and how it is said.
struct Condition {
  std::string_view text;
  bool (*holds)(const ConvSpec& spec);
};

/// Versions from the first on and before the last. The last of 0 is no limit.
struct VersionRange {
  size_t first = 0;
  size_t before = 0;
};

/// A row of the table: what has all of these is not used.
struct KnownFault {
  std::optional<ConvOp> op;  ///< none: each operation
  std::string_view engine;   ///< empty: each engine
  std::string_view knob;     ///< only plans with it: "k25=1", or "k0" of any value; empty: all
  bool tensor_cores;         ///< only plans that use tensor cores
  VersionRange sm, cudnn, cublaslt;
  std::vector<DataType> dtypes;  ///< empty: each dtype
  Condition condition;
  Fault fault;
  std::string_view source;  ///< who says so: a file of this project, or an address
};

/// A row in words, as it is shown to users.
struct KnownFaultText {
  std::string op, engine, sm, cudnn, cublaslt, dtypes, condition, fault, source;
};

/// The engine in a plan's name: "eng20" of "eng20_k2=6_k3=0".
[[nodiscard]] std::string_view EngineOf(std::string_view plan_name);

/// Whether a list such as "eng5,eng57" has the engine.
[[nodiscard]] bool Lists(std::string_view engines, std::string_view engine);

/// The first row that keeps this plan from being used, or null. It lives as long as the process.
[[nodiscard]] const KnownFault* FaultOf(const ConvSpec& spec, const Candidate& candidate,
                                        const Target& target, const Demands& demands);

/// Every row that may apply on a target.
[[nodiscard]] std::vector<KnownFaultText> KnownFaultsOn(const Target& target);

[[nodiscard]] KnownFaultText TextOf(const KnownFault& row);

/// One line, such as "eng1, wgrad, low and high padding differ: wrong numbers (docs/decisions.md)".
[[nodiscard]] std::string Summary(const KnownFaultText& row);

}  // namespace jaxcudnn
