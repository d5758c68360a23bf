#include "base/proc_file.hpp"

#include <charconv>
#include <fstream>
#include <sstream>

namespace kvmem {

namespace {

// A file that is absent or does not say a number says nothing: there is no limit to be read from
// it.
std::optional<std::uint64_t> number_in(const std::string& word) {
  std::uint64_t value = 0;
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, value);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return value;
}

}  // namespace

std::optional<std::uint64_t> number_in_file(const std::string& path) {
  std::ifstream file(path);
  std::string word, more;
  if (!(file >> word) || file >> more) return std::nullopt;
  return number_in(word);
}

std::optional<std::uint64_t> number_of_key(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name, value;
    if (words >> name >> value && name == key) return number_in(value);
  }
  return std::nullopt;
}

}  // namespace kvmem
