// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <string>

#include "error.h"

namespace jaxcudnn::testing {

inline int failures = 0;

inline void Check(bool holds, const std::string& what, const char* file, int line) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

/// What `body` threw, as "code: text"; a text of its own if it threw nothing.
template <typename Body>
std::string ErrorOf(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return std::to_string(static_cast<int>(error.code())) + ": " + error.what();
  }
  return "nothing was thrown";
}

/// Whether `body` throws an Error of this code whose text contains `part`.
template <typename Body>
bool Throws(ErrorCode code, const std::string& part, const Body& body) {
  const std::string text = ErrorOf(body);
  return text.rfind(std::to_string(static_cast<int>(code)) + ": ", 0) == 0 &&
         text.find(part) != std::string::npos;
}

}  // namespace jaxcudnn::testing

#define CHECK(condition) ::jaxcudnn::testing::Check((condition), #condition, __FILE__, __LINE__)
#define CHECK_FOR(condition, subject)                                                          \
  ::jaxcudnn::testing::Check((condition), #condition " for " + std::string(subject), __FILE__, \
                             __LINE__)
