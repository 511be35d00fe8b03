// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace jaxcudnn {

/// A named reference to a member. A value type lists its members once, in `fields()`, and gets
/// equality, hash and text from the functions below; a key can then never forget a member.
template <typename T>
struct Field {
  const char* name;
  const T& value;
};
template <typename T>
Field(const char*, const T&) -> Field<T>;

template <typename T, typename = void>
struct HasFields : std::false_type {};
template <typename T>
struct HasFields<T, std::void_t<decltype(std::declval<const T&>().fields())>> : std::true_type {};

// Declared ahead, since the templates below call one another on members that are vectors.
template <typename T>
[[nodiscard]] size_t HashOf(const std::vector<T>& values);
template <typename T>
[[nodiscard]] std::string TextOf(const std::vector<T>& values);

inline void MixHash(size_t& seed, size_t hash) {
  // boost::hash_combine, widened to 64 bits: order matters, unlike a plain xor.
  seed ^= hash + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2);
}

template <typename T>
[[nodiscard]] size_t HashOf(const T& value) {
  if constexpr (HasFields<T>::value) {
    size_t seed = 0;
    std::apply([&](const auto&... field) { (MixHash(seed, HashOf(field.value)), ...); },
               value.fields());
    return seed;
  } else {
    return std::hash<T>{}(value);
  }
}

template <typename T>
[[nodiscard]] size_t HashOf(const std::vector<T>& values) {
  size_t seed = values.size();
  for (const T& value : values) MixHash(seed, HashOf(value));
  return seed;
}

template <typename T, std::enable_if_t<HasFields<T>::value, int> = 0>
[[nodiscard]] bool operator==(const T& a, const T& b) {
  return std::apply(
      [&](const auto&... in_a) {
        return std::apply([&](const auto&... in_b) { return ((in_a.value == in_b.value) && ...); },
                          b.fields());
      },
      a.fields());
}

struct FieldsHash {
  template <typename T>
  size_t operator()(const T& value) const {
    return HashOf(value);
  }
};

template <typename T>
[[nodiscard]] std::string TextOf(const T& value) {
  std::ostringstream out;
  if constexpr (HasFields<T>::value) {
    const char* separator = "";
    std::apply(
        [&](const auto&... field) {
          ((out << separator << field.name << "=" << TextOf(field.value), separator = " "), ...);
        },
        value.fields());
  } else if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_enum_v<T>) {
    out << NameOf(value);  // found by argument-dependent look-up
  } else {
    out << value;
  }
  return out.str();
}

template <typename T>
[[nodiscard]] std::string TextOf(const std::vector<T>& values) {
  std::string text = "(";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? "," : "") + TextOf(values[i]);
  return text + ")";
}

}  // namespace jaxcudnn
