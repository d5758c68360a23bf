#include "model/sim/runner.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <new>
#include <numeric>

namespace kvmem::sim {

namespace {

// A lost device leaks on purpose, so children do not last.
constexpr std::uint64_t operations_a_child = 200'000;
constexpr unsigned seconds_a_case = 120;  // more is a hang, under any sanitizer
constexpr std::size_t most_shrink_runs = 3000;

// What a child tells; its parent reads it also when the child has crashed.
struct Told {
  std::atomic<std::uint64_t> number{0}, cases_run{0};
  std::atomic<std::size_t> at{0};
  std::atomic<bool> failed{false};
  Tally tally;
  char what[400] = "";
};

class SharedTold {
 public:
  SharedTold()
      : memory_(mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                     0)) {
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    new (memory_) Told;
  }
  SharedTold(const SharedTold&) = delete;
  SharedTold& operator=(const SharedTold&) = delete;
  ~SharedTold() { munmap(memory_, sizeof(Told)); }
  Told* operator->() const { return static_cast<Told*>(memory_); }

 private:
  void* memory_;
};

void tell(const SharedTold& told, const Outcome& outcome) {
  told->at = outcome.at;
  told->failed = outcome.failed;
  std::snprintf(told->what, sizeof told->what, "%s", outcome.what.c_str());
}

// `at` is kept up to date, for the parent of a child that crashes.
Outcome run_noting(const Case& one, Tally& tally, std::atomic<std::size_t>& at) {
  std::size_t i = 0;
  try {
    Simulation simulation(one.shape);
    for (; i < one.program.size(); ++i) {
      at.store(i, std::memory_order_relaxed);
      simulation.run(one.program[i]);
    }
    at.store(i);
    simulation.finish();
    tally.add(simulation.tally());
  } catch (const std::exception& error) {
    return {true, i, error.what()};
  }
  return {};
}

template <class Body>
pid_t start_child(Body&& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    body();
    std::fflush(nullptr);
    _exit(0);
  }
  return child;
}

// Of a child that has ended with that status.
Outcome outcome_of(const SharedTold& told, int status) {
  if (told->failed) return {true, told->at, told->what};
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return {true, told->at, signal == SIGALRM ? "hangs" : text("crashes with signal ", signal)};
  }
  if (WEXITSTATUS(status) != 0) {  // a sanitizer's way to end a process
    return {true, told->at, text("ends the process with status ", WEXITSTATUS(status))};
  }
  return {};
}

}  // namespace

Outcome run(const Case& one, Tally& tally) {
  std::atomic<std::size_t> at{0};
  return run_noting(one, tally, at);
}

Outcome run_in_child(const Case& one, unsigned seconds) {
  const SharedTold told;
  const pid_t child = start_child([&] {
    alarm(seconds);
    tell(told, run_noting(one, told->tally, told->at));
  });
  int status = 0;
  waitpid(child, &status, 0);
  return outcome_of(told, status);
}

Cases over(Cases cases, const test::OverFake& fake) {
  return [cases = std::move(cases), fake](std::uint64_t number) {
    Case one = cases(number);
    one.shape.over_fake = fake;
    return one;
  };
}

Cases seeded(std::size_t operations) {
  return [operations](std::uint64_t seed) {
    return Case{shape_of(seed), make_program(seed, operations)};
  };
}

namespace {

// Children at work, and what those told that have ended.
class Crew {
 public:
  Crew(const Cases& cases, const Sweep& sweep) : cases_(cases), sweep_(sweep) {
    const std::size_t length = std::max<std::size_t>(cases(sweep.first).program.size(), 1);
    cases_a_child_ = std::max<std::uint64_t>(operations_a_child / length, 1);
  }

  [[nodiscard]] bool more() const { return next_ < sweep_.count && !result_.outcome.failed; }
  [[nodiscard]] std::size_t size() const { return children_.size(); }
  [[nodiscard]] const SweepResult& result() const { return result_; }

  void start() {
    const std::uint64_t from = sweep_.first + next_;
    next_ = std::min(next_ + cases_a_child_, sweep_.count);
    const std::uint64_t to = sweep_.first + next_;
    children_.push_back(std::make_unique<Child>());
    const SharedTold& told = children_.back()->told;
    children_.back()->pid = start_child([&] {
      for (std::uint64_t number = from; number < to; ++number) {
        told->number = number;
        alarm(seconds_a_case);
        const Outcome outcome = run_noting(cases_(number), told->tally, told->at);
        if (outcome.failed) return tell(told, outcome);
        ++told->cases_run;
      }
    });
  }

  void reap() {
    int status = 0;
    const pid_t pid = waitpid(-1, &status, 0);
    const auto child = std::ranges::find(children_, pid, [](const auto& one) { return one->pid; });
    if (child == children_.end()) return;
    const SharedTold& told = (*child)->told;
    const Outcome outcome = outcome_of(told, status);
    // Of several, the first case: another run then finds the same one.
    if (outcome.failed && (!result_.outcome.failed || told->number < result_.failed_case)) {
      result_.failed_case = told->number;
      result_.outcome = outcome;
    }
    result_.tally.add(told->tally);
    result_.cases_run += told->cases_run;
    children_.erase(child);
    if (sweep_.progress && ++ended_ % 50 == 0)
      std::fprintf(stderr, "%llu of %llu cases\n",
                   static_cast<unsigned long long>(result_.cases_run),
                   static_cast<unsigned long long>(sweep_.count));
  }

 private:
  struct Child {
    pid_t pid = 0;
    SharedTold told;
  };
  const Cases& cases_;
  const Sweep& sweep_;
  std::uint64_t cases_a_child_ = 1, next_ = 0, ended_ = 0;
  std::vector<std::unique_ptr<Child>> children_;
  SweepResult result_;
};

}  // namespace

SweepResult run_cases(const Cases& cases, const Sweep& sweep) {
  Crew crew(cases, sweep);
  while (crew.more()) {
    crew.start();
    if (crew.size() >= sweep.jobs) crew.reap();
  }
  while (crew.size() > 0) crew.reap();
  return crew.result();
}

Case only(const Case& one, const std::vector<std::size_t>& places) {
  Case kept{one.shape, {}};
  for (const std::size_t place : places) {
    if (place < one.program.size()) kept.program.push_back(one.program[place]);
  }
  return kept;
}

std::vector<std::size_t> shrink(std::size_t operations,
                                const std::function<bool(const std::vector<std::size_t>&)>& fails) {
  std::vector<std::size_t> places(operations);
  std::iota(places.begin(), places.end(), std::size_t{0});
  std::size_t runs = 0;
  // Parts of half the size each time, until no single operation can be left out.
  for (std::size_t part = std::max<std::size_t>(places.size() / 2, 1);;) {
    bool less = false;
    for (std::size_t at = 0; at < places.size() && runs < most_shrink_runs;) {
      std::vector<std::size_t> fewer = places;
      const auto from = fewer.begin() + static_cast<std::ptrdiff_t>(at);
      fewer.erase(from, from + static_cast<std::ptrdiff_t>(std::min(part, places.size() - at)));
      ++runs;
      if (fails(fewer)) {
        places = std::move(fewer);
        less = true;
      } else {
        at += part;
      }
    }
    if (runs >= most_shrink_runs || (part == 1 && !less)) return places;
    part = std::max<std::size_t>(part / 2, 1);
  }
}

}  // namespace kvmem::sim
