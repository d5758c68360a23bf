// kvmem-sim: runs the simulation for as long as one likes. A seed that fails is made short, and
// the one command that replays it is printed.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "model/sim/runner.hpp"

namespace {

using namespace kvmem::sim;

constexpr const char* usage =
    "kvmem-sim [--seeds A..B] [--ops N | --sequences N] [--jobs J] [--keep LIST]\n"
    "          [--shrink 0|1] [--least PERCENT] [--device NAME]\n"
    "  --seeds A..B     cases A to B, B excluded (0..100; of --sequences: all)\n"
    "  --ops N          each case is a world and N operations drawn from a seed (5000)\n"
    "  --sequences N    each case is one of all sequences of N operations in the smallest world\n"
    "  --jobs J         processes at once (one a core)\n"
    "  --keep LIST      only these operations of each case, as 3,17,22-30\n"
    "  --shrink 0|1     make a case that fails short (1)\n"
    "  --least PERCENT  fail if fewer operations of any kind were accepted (0)\n"
    "  --device NAME    virtual; or the CUDA device over a fake runtime: cuda12, cuda13, or\n"
    "                   cuda13-one-by-one, without batched copies (virtual)\n"
    "Exit status: 0 all invariants held; 1 one did not; 2 could not run.\n"
    "Example: kvmem-sim --seeds 0..10000 --ops 5000\n";

struct Options {
  std::uint64_t from = 0, to = 0;  // equal: not given
  std::size_t operations = 5000;
  std::size_t length = 0;  // of sequences; 0: seeded programs
  unsigned jobs = std::max(1U, std::thread::hardware_concurrency());
  unsigned least_percent = 0, shrink = 1;
  std::optional<std::vector<std::size_t>> keep;
  std::string_view device = "virtual";

  [[nodiscard]] Cases cases() const {
    Cases any = length > 0 ? sequences(length) : seeded(operations);
    if (device == "virtual") return any;
    return over(std::move(any),
                {.major = device == "cuda12" ? 12 : 13, .batch = device != "cuda13-one-by-one"});
  }
  [[nodiscard]] std::string name() const {
    return (length > 0 ? " --sequences " + std::to_string(length)
                       : " --ops " + std::to_string(operations)) +
           (device == "virtual" ? "" : " --device " + std::string(device));
  }
};

template <class Number>
bool parse(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

bool parse_range(std::string_view text, std::string_view between, std::uint64_t& from,
                 std::uint64_t& to) {
  const std::size_t at = text.find(between);
  if (at == std::string_view::npos) return false;
  return parse(text.substr(0, at), from) && parse(text.substr(at + between.size()), to);
}

bool parse_places(std::string_view text, std::vector<std::size_t>& places) {
  while (!text.empty()) {
    const std::string_view one = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), one.size() + 1));
    std::uint64_t first = 0, last = 0;
    if (!parse_range(one, "-", first, last)) {
      if (!parse(one, first)) return false;
      last = first;
    }
    for (; first <= last; ++first) places.push_back(first);
  }
  return true;
}

std::optional<Options> parse_options(int count, char** values) {
  Options options;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string_view name = values[i], value = values[i + 1];
    bool good = false;
    if (name == "--seeds") {
      good = parse_range(value, "..", options.from, options.to) && options.from < options.to;
    } else if (name == "--ops") {
      good = parse(value, options.operations) && options.operations > 0;
    } else if (name == "--sequences") {
      good = parse(value, options.length) && options.length > 0 && options.length <= 12;
    } else if (name == "--jobs") {
      good = parse(value, options.jobs) && options.jobs > 0;
    } else if (name == "--least") {
      good = parse(value, options.least_percent) && options.least_percent <= 100;
    } else if (name == "--shrink") {
      good = parse(value, options.shrink) && options.shrink <= 1;
    } else if (name == "--device") {
      options.device = value;
      good = value == "virtual" || value == "cuda12" || value == "cuda13" ||
             value == "cuda13-one-by-one";
    } else if (name == "--keep") {
      good = parse_places(value, options.keep.emplace());
    }
    if (!good) {
      std::fprintf(stderr, "kvmem-sim: %s %s is no option\n%s", values[i], values[i + 1], usage);
      return std::nullopt;
    }
  }
  if (count % 2 == 0) {
    std::fputs(usage, stderr);
    return std::nullopt;
  }
  if (options.from == options.to)
    options.to = options.length > 0 ? sequence_count(options.length) : 100;
  return options;
}

std::string listed(const std::vector<std::size_t>& places) {
  std::string list;
  for (std::size_t i = 0; i < places.size();) {
    std::size_t last = i;
    while (last + 1 < places.size() && places[last + 1] == places[last] + 1) ++last;
    if (!list.empty()) list += ',';
    list += std::to_string(places[i]);
    if (last > i) list += '-' + std::to_string(places[last]);
    i = last + 1;
  }
  return list;
}

double percent(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

// Returns whether every kind was accepted often enough.
bool print_tally(const Tally& tally, unsigned least_percent) {
  bool enough = true;
  std::printf("%-14s %12s %12s %9s\n", "operation", "tried", "accepted", "share");
  std::uint64_t tried = 0;
  for (std::size_t i = 0; i < kinds; ++i) {
    const double share = percent(tally.accepted[i], tally.tried[i]);
    const bool poor = share < least_percent;
    enough &= !poor;
    tried += tally.tried[i];
    std::printf("%-14s %12llu %12llu %8.1f%%%s\n", name_of(static_cast<Kind>(i)),
                static_cast<unsigned long long>(tally.tried[i]),
                static_cast<unsigned long long>(tally.accepted[i]), share, poor ? "  too few" : "");
  }
  std::printf(
      "%llu operations; transfers done %llu, failed %llu, cancelled %llu; calls failed %llu;"
      " blocks compared %llu\n",
      static_cast<unsigned long long>(tried), static_cast<unsigned long long>(tally.done),
      static_cast<unsigned long long>(tally.failed),
      static_cast<unsigned long long>(tally.cancelled),
      static_cast<unsigned long long>(tally.faults),
      static_cast<unsigned long long>(tally.blocks_compared));
  return enough;
}

const char* name_at(const Case& one, std::size_t at) {
  return at < one.program.size() ? name_of(one.program[at].kind) : "the end";
}

void print_failure(const Options& options, std::uint64_t number, const Outcome& outcome) {
  const Case one = options.cases()(number);
  std::printf("case %llu, operation %zu (%s): %s\n", static_cast<unsigned long long>(number),
              outcome.at, name_at(one, outcome.at), outcome.what.c_str());
  if (options.shrink == 0) return;
  const auto places = shrink(std::min(outcome.at + 1, one.program.size()),
                             [&](const std::vector<std::size_t>& some) {
                               return run_in_child(only(one, some), 10).failed;
                             });
  const Outcome again = run_in_child(only(one, places), 10);
  std::printf("%zu of its operations are enough: %s\n", places.size(), again.what.c_str());
  for (const std::size_t place : places) {
    std::printf("  %6zu %s\n", place, name_of(one.program[place].kind));
  }
  std::printf("replay: kvmem-sim --seeds %llu..%llu%s --keep %s\n",
              static_cast<unsigned long long>(number), static_cast<unsigned long long>(number + 1),
              options.name().c_str(), listed(places).c_str());
}

// Without a child, so that a debugger sees it.
int replay(const Options& options) {
  for (std::uint64_t number = options.from; number < options.to; ++number) {
    Tally tally;
    const Case one = only(options.cases()(number), *options.keep);
    const Outcome outcome = run(one, tally);
    if (!outcome.failed) continue;
    std::printf("case %llu, kept operation %zu (%s): %s\n", static_cast<unsigned long long>(number),
                outcome.at, name_at(one, outcome.at), outcome.what.c_str());
    return 1;
  }
  std::puts("all invariants held");
  return 0;
}

}  // namespace

int main(int count, char** values) {
  const auto options = parse_options(count, values);
  if (!options) return 2;
  if (options->keep) return replay(*options);
  const auto begun = std::chrono::steady_clock::now();
  const SweepResult result = run_cases(
      options->cases(), {options->from, options->to - options->from, options->jobs, true});
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  const bool enough = print_tally(result.tally, options->least_percent);
  if (result.outcome.failed) {
    print_failure(*options, result.failed_case, result.outcome);
    return 1;
  }
  std::printf("%llu cases%s in %.1f s: all invariants held\n",
              static_cast<unsigned long long>(result.cases_run), options->name().c_str(),
              took.count());
  if (!enough) std::puts("too few operations of a kind were accepted");
  return enough ? 0 : 1;
}
