// SPDX-License-Identifier: Apache-2.0
//
// The one translation unit with cudnn_frontend, which takes most of a minute to compile.
#include "planner.h"

#include <malloc.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "backend_plan.h"
#include "conv_graph.h"
#include "error.h"
#include "known_faults.h"
#include "libraries.h"
#include "version_text.h"

// cudnn_frontend calls cuDNN through this handle, which Frontend() sets before the first call.
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace jaxcudnn {
namespace {

void LoadFrontend() {
  static const bool loaded = [] {
    fe::cudnn_dlhandle = Cudnn().handle;
    return true;
  }();
  (void)loaded;
}

std::string Describe(const Problem& problem) {
  return TextOf(problem.spec) + ", operands aligned to " + std::to_string(problem.alignment) +
         " bytes";
}

/// Names that share the most with `wanted`, those of the same engine first.
std::string Nearest(std::vector<std::string> names, std::string_view wanted) {
  constexpr size_t kShown = 5;
  const auto shared = [&](const std::string& name) {
    const auto end = std::mismatch(name.begin(), name.end(), wanted.begin(), wanted.end()).first;
    return std::make_pair(EngineOf(name) == EngineOf(wanted), end - name.begin());
  };
  std::stable_sort(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return shared(a) > shared(b);
  });
  std::string text;
  for (size_t i = 0; i < std::min(kShown, names.size()); ++i) text += (i ? ", " : "") + names[i];
  return text;
}

/// Bytes that this process has from malloc, whichever thread asked for them; 0 if it cannot say.
int64_t AllocatedBytes() {
#if defined(__GLIBC_PREREQ)
#if __GLIBC_PREREQ(2, 33)
  const struct mallinfo2 info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
#endif
#endif
  return 0;
}

class PropertiesPlanner final : public Planner {
 public:
  PropertiesPlanner(int device, DeviceProperties properties, const Target& target)
      : device_(device), properties_(std::move(properties)), target_(target) {}

  [[nodiscard]] PlanPointer First(const Problem& problem) const override {
    const int64_t before = AllocatedBytes();
    std::shared_ptr<BackendPlan> plan = BuildFirst(problem);
    plan->set_host_bytes(std::max<int64_t>(0, AllocatedBytes() - before));
    return plan;
  }

  [[nodiscard]] PlanPointer Named(const Problem& problem, std::string_view name,
                                  const Origin& origin) const override {
    const int64_t before = AllocatedBytes();
    std::shared_ptr<BackendPlan> plan = BuildNamed(problem, name, origin);
    plan->set_host_bytes(std::max<int64_t>(0, AllocatedBytes() - before));
    return plan;
  }

  [[nodiscard]] std::vector<PlanPointer> Candidates(const Problem& problem) const override {
    const DeviceScope scope(device_);
    ConvGraph graph(problem, properties_, target_);
    std::vector<PlanPointer> plans;
    for (FoundPlan& found : graph.All(problem.options.is_exhaustive())) {
      plans.push_back(Finish(problem, std::move(found), {}));
    }
    if (plans.empty()) ThrowNone(problem, graph.reason());
    return plans;
  }

  [[nodiscard]] PlanPointer Compiled(const Problem& problem) const override {
    const DeviceScope scope(device_);
    ConvGraph graph(problem, properties_, target_);
    if (auto found = graph.FirstCompiled()) return Finish(problem, *std::move(found), {});
    return nullptr;
  }

 private:
  /// Whose graph is gone when it returns.
  [[nodiscard]] std::shared_ptr<BackendPlan> BuildFirst(const Problem& problem) const {
    const DeviceScope scope(device_);
    ConvGraph graph(problem, properties_, target_);
    auto found = graph.First();
    if (!found) ThrowNone(problem, graph.reason());
    return Finish(problem, *std::move(found), {});
  }

  [[nodiscard]] std::shared_ptr<BackendPlan> BuildNamed(const Problem& problem,
                                                        std::string_view name,
                                                        const Origin& origin) const {
    const DeviceScope scope(device_);
    ConvGraph graph(problem, properties_, target_);
    if (auto found = graph.Named(name)) return Finish(problem, *std::move(found), origin);
    const std::string nearest = Nearest(ConvGraph(problem, properties_, target_).Names(), name);
    if (nearest.empty()) ThrowNone(problem, graph.reason());
    throw Error(ErrorCode::kInvalidArgument,
                "cuDNN " + VersionText(Cudnn().version) + " has no plan '" + std::string(name) +
                    "' for this convolution, or the options forbid it; the nearest are " + nearest +
                    ". The convolution: " + Describe(problem));
  }

  [[nodiscard]] std::shared_ptr<BackendPlan> Finish(const Problem& problem, FoundPlan found,
                                                    Origin origin) const {
    return std::make_shared<BackendPlan>(std::move(found), properties_, problem.spec.op,
                                         std::move(origin));
  }

  [[noreturn]] void ThrowNone(const Problem& problem, const std::string& reason) const {
    Problem unlimited = problem;
    unlimited.workspace_limit = std::numeric_limits<int64_t>::max();
    if (auto larger = ConvGraph(unlimited, properties_, target_).First()) {
      throw Error(ErrorCode::kResourceExhausted,
                  "every cuDNN plan for this convolution needs more workspace than the " +
                      std::to_string(problem.workspace_limit) + " bytes given; " + larger->name +
                      " needs " + std::to_string(larger->plan->getWorkspaceSize()) +
                      " bytes. The convolution: " + Describe(problem));
    }
    throw Error(
        ErrorCode::kUnsupported,
        "cuDNN " + VersionText(Cudnn().version) +
            " has no plan for this convolution that the options allow: " + Describe(problem) +
            ". cuDNN's last reason: " + reason.substr(0, kLongestReason));
  }

  int device_;  // kNoDevice if there need be none
  DeviceProperties properties_;
  Target target_;
};

}  // namespace

const Planner& PlannerOf(int device) {
  LoadFrontend();
  static auto* mutex = new std::mutex;
  static auto* known = new std::unordered_map<int, std::unique_ptr<const Planner>>;
  std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<const Planner>& entry = (*known)[device];
  if (!entry) {
    DeviceScope scope(device);
    auto properties = std::make_shared<fe::DeviceProperties>();
    CheckFrontend(properties->set_device_id(device).build(), "reading the device's properties");
    entry = std::make_unique<PropertiesPlanner>(device, std::move(properties), TargetOf(device));
  }
  return *entry;
}

std::unique_ptr<const Planner> PlannerFromProperties(const std::string& properties_json) {
  LoadFrontend();
  auto properties = std::make_shared<fe::DeviceProperties>();
  CheckFrontend(properties->deserialize({properties_json.begin(), properties_json.end()}),
                "reading the device properties given as JSON");
  // Its compute capability is left unknown, so that the faults of every GPU are avoided.
  const Target target{0, Cudnn().version, CublasLtVersion()};
  return std::make_unique<PropertiesPlanner>(kNoDevice, std::move(properties), target);
}

}  // namespace jaxcudnn
