// Numbers in the small files in which the kernel tells about itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace kvmem {

// The only word of the file. Nothing where the file or the number is not there or does not fit.
[[nodiscard]] std::optional<std::uint64_t> number_in_file(const std::string& path);

// The number behind `key` in a file of lines "key number" or "key: number kB".
[[nodiscard]] std::optional<std::uint64_t> number_of_key(const std::string& path,
                                                         const std::string& key);

}  // namespace kvmem
