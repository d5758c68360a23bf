#include "model/sim/operations.hpp"

#include <numeric>
#include <random>

namespace kvmem::sim {

namespace {

struct Entry {
  const char* name;
  unsigned weight;
};

// In the order of Kind.
constexpr std::array<Entry, kinds> table{
    {{"acquire", 50},  {"ticket", 16},       {"share", 25}, {"release", 70}, {"release_after", 20},
     {"offload", 100}, {"offload_into", 25}, {"admit", 24}, {"restore", 90}, {"wait_on", 50},
     {"wait", 25},     {"cancel", 20},       {"drop", 30},  {"poll", 130},   {"drain", 8},
     {"rebind", 5},    {"close", 4},         {"write", 80}, {"read", 60},    {"stall", 12},
     {"step", 300},    {"advance", 40},      {"hold", 4},   {"fail", 5},     {"lose", 2}}};

}  // namespace

const char* name_of(Kind kind) { return table[static_cast<std::size_t>(kind)].name; }

std::vector<Operation> make_program(std::uint64_t seed, std::size_t operations) {
  std::mt19937_64 random(seed);
  const unsigned sum = std::accumulate(table.begin(), table.end(), 0U,
                                       [](unsigned all, const Entry& e) { return all + e.weight; });
  std::vector<Operation> program(operations);
  for (Operation& operation : program) {
    auto draw = static_cast<unsigned>(random() % sum);
    std::size_t kind = 0;
    while (draw >= table[kind].weight) draw -= table[kind++].weight;
    operation.kind = static_cast<Kind>(kind);
    for (std::size_t i = 0; i < operation.draw.size(); i += 2) {
      const std::uint64_t both = random();
      operation.draw[i] = static_cast<std::uint32_t>(both);
      operation.draw[i + 1] = static_cast<std::uint32_t>(both >> 32);
    }
  }
  return program;
}

}  // namespace kvmem::sim
