// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

namespace jaxcudnn {

/// "9.19.0" for 91900, which is how NVIDIA's libraries say their version.
[[nodiscard]] inline std::string VersionText(size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace jaxcudnn
