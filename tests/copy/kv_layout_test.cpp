#include "copy/kv_layout.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"

namespace kvmem {
namespace {

Region region(std::uint64_t address, std::uint64_t stride, std::uint64_t payload,
              std::uint64_t count, std::int64_t stage = 0) {
  return {.address = address,
          .stride_bytes = stride,
          .payload_bytes = payload,
          .block_count = count,
          .memory = "host",
          .stage = stage};
}

std::string refusal(std::vector<Region> regions) {
  try {
    const KVLayout layout(std::move(regions));
    return {};
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

void expect_refusal(std::vector<Region> regions, std::vector<std::string> parts) {
  const std::string message = refusal(std::move(regions));
  EXPECT_NE(message, "") << "was accepted; should name " << parts.front();
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << message << " does not name " << part;
  }
}

// Public failure 174: a size of zero was accepted.
TEST(KVLayout, ZeroSizesAreRefusedByName) {
  expect_refusal({}, {"at least one region"});
  expect_refusal({region(0, 16, 16, 4)}, {"region 0", "address"});
  expect_refusal({region(64, 16, 0, 4)}, {"region 0", "payload_bytes is 0"});
  expect_refusal({region(64, 0, 0, 4)}, {"region 0", "payload_bytes is 0"});
  expect_refusal({region(64, 16, 16, 0)}, {"region 0", "block_count is 0"});
  expect_refusal({region(64, 16, 16, 4), region(1064, 16, 0, 4)}, {"region 1", "payload_bytes"});
}

TEST(KVLayout, AStrideBelowThePayloadIsRefusedWithBothValues) {
  expect_refusal({region(64, 15, 16, 4)}, {"region 0", "stride_bytes 15", "payload_bytes 16"});
  expect_refusal({region(64, 0, 16, 4)}, {"region 0", "stride_bytes 0", "payload_bytes 16"});
}

TEST(KVLayout, ANegativeStageIsRefused) {
  expect_refusal({region(64, 16, 16, 4, -3)}, {"region 0", "stage -3"});
}

TEST(KVLayout, CountsAndMemoriesThatDifferAreRefusedWithBothValues) {
  expect_refusal({region(64, 16, 16, 4), region(1064, 16, 16, 5)},
                 {"region 1", "block_count 5", "region 0 has 4"});
  Region elsewhere = region(1064, 16, 16, 4);
  elsewhere.memory = "cuda:0";
  expect_refusal({region(64, 16, 16, 4), elsewhere}, {"region 1", "cuda:0", "region 0 in host"});
}

// Public failure 171: a size beyond the addressable limit was accepted.
TEST(KVLayout, RangesBeyondTheAddressSpaceAreRefusedAndThoseJustBelowAreNot) {
  constexpr std::uint64_t top = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(refusal({region(top - 64, 16, 16, 4)}), "");
  expect_refusal({region(top - 63, 16, 16, 4)}, {"region 0", "2^64"});
  // The padding behind the last payload is never touched and needs no address.
  EXPECT_EQ(refusal({region(top - 56, 16, 8, 4)}), "");
  expect_refusal({region(top - 55, 16, 8, 4)}, {"region 0", "2^64"});
  // Products that wrap to something small.
  expect_refusal({region(64, std::uint64_t{1} << 33, 16, (std::uint64_t{1} << 31) + 1)}, {"2^64"});
  expect_refusal({region(64, std::uint64_t{1} << 63, 16, 3)}, {"2^64"});
  expect_refusal({region(64, top, top, 2)}, {"2^64"});
  expect_refusal({region(64, 1, 1, top)}, {"2^64"});
}

TEST(KVLayout, OverlappingRegionsAreRefusedByTheirNumbersInAnyOrder) {
  const Region a = region(1000, 32, 32, 8);
  expect_refusal({a, region(1000, 32, 32, 8)}, {"regions 0 and 1", "overlap"});
  expect_refusal({a, region(1255, 32, 32, 8)}, {"overlap"});
  expect_refusal({region(1255, 32, 32, 8), a}, {"overlap"});
  expect_refusal({a, region(4000, 32, 32, 8), region(999, 1, 1, 8)},
                 {"regions 2 and 0", "overlap"});
  EXPECT_EQ(refusal({a, region(1256, 32, 32, 8)}), "");
  EXPECT_EQ(refusal({a, region(992, 1, 1, 8)}), "");
}

TEST(KVLayout, KeysAndValuesMayInterleaveButNotShareAByte) {
  // One tensor [block][K or V][payload]: equal strides, V half a stride behind K.
  EXPECT_EQ(refusal({region(1000, 64, 32, 8), region(1032, 64, 32, 8)}), "");
  EXPECT_EQ(refusal({region(1032, 64, 32, 8), region(1000, 64, 32, 8)}), "");
  expect_refusal({region(1000, 64, 32, 8), region(1031, 64, 32, 8)}, {"overlap"});
  expect_refusal({region(1000, 64, 32, 8), region(1033, 64, 32, 8)}, {"overlap"});
  // Shifted by whole strides: only the last block of the one has room in front of it.
  EXPECT_EQ(refusal({region(1000, 64, 32, 8), region(1000 + 7 * 64 + 32, 64, 32, 8)}), "");
  expect_refusal({region(1000, 64, 32, 8), region(1000 + 7 * 64 + 31, 64, 32, 8)}, {"overlap"});
}

TEST(KVLayout, DifferingStridesMayInterleaveWhereNoSegmentsMeet) {
  // 8-byte segments at 0, 48, 96 between 8-byte segments at 16, 40, 64: free.
  EXPECT_EQ(refusal({region(1000, 48, 8, 3), region(1016, 24, 8, 3)}), "");
  expect_refusal({region(1000, 48, 8, 3), region(1016, 17, 8, 3)}, {"overlap"});
}

// Every pair of small regions against a map of bytes.
TEST(KVLayout, TheOverlapCheckIsExactOnAllSmallWorlds) {
  std::size_t refused = 0;
  std::size_t accepted = 0;
  for (std::uint64_t stride_a = 1; stride_a <= 5; ++stride_a)
    for (std::uint64_t payload_a = 1; payload_a <= stride_a; ++payload_a)
      for (std::uint64_t stride_b = 1; stride_b <= 5; ++stride_b)
        for (std::uint64_t payload_b = 1; payload_b <= stride_b; ++payload_b)
          for (std::uint64_t count = 1; count <= 4; ++count)
            for (std::uint64_t start_b = 1; start_b <= 45; ++start_b) {
              const Region a = region(20, stride_a, payload_a, count);
              const Region b = region(start_b, stride_b, payload_b, count);
              std::vector<int> map(100);
              for (const Region& each : {a, b})
                for (std::uint64_t i = 0; i < count; ++i)
                  for (std::uint64_t k = 0; k < each.payload_bytes; ++k)
                    ++map[each.address + i * each.stride_bytes + k];
              const bool overlap = std::ranges::max(map) > 1;
              const std::string answer = refusal({a, b});
              ASSERT_EQ(!answer.empty(), overlap)
                  << stride_a << ' ' << payload_a << ' ' << stride_b << ' ' << payload_b << ' '
                  << count << ' ' << start_b << ' ' << answer;
              ++(overlap ? refused : accepted);
            }
  EXPECT_GT(refused, 1000U);
  EXPECT_GT(accepted, 1000U);
}

TEST(KVLayout, SegmentsComeInStageOrderAndKeepTheirPlaceInTheSlot) {
  const KVLayout layout({region(1000, 16, 10, 2, 7), region(2000, 32, 20, 2, 3),
                         region(3000, 16, 5, 2, 7), region(4000, 16, 16, 2, 3)});
  EXPECT_EQ(layout.block_bytes(), 51U);
  EXPECT_EQ(layout.smallest_segment_bytes(), 5U);
  EXPECT_EQ(std::vector(layout.stages().begin(), layout.stages().end()),
            (std::vector<std::int64_t>{3, 7}));
  std::vector<std::uint64_t> addresses, offsets;
  std::vector<std::size_t> stages;
  for (const KVLayout::Segment& segment : layout.segments()) {
    addresses.push_back(segment.address);
    offsets.push_back(segment.slot_offset_bytes);
    stages.push_back(segment.stage_index);
  }
  EXPECT_EQ(addresses, (std::vector<std::uint64_t>{2000, 4000, 1000, 3000}));
  EXPECT_EQ(offsets, (std::vector<std::uint64_t>{10, 35, 0, 30}));  // as declared
  EXPECT_EQ(stages, (std::vector<std::size_t>{0, 0, 1, 1}));
  EXPECT_EQ(layout.stage_index(3), 0U);
  EXPECT_EQ(layout.stage_index(7), 1U);
}

TEST(KVLayout, AnUnknownStageIsRefusedWithTheStagesThereAre) {
  const KVLayout layout({region(1000, 16, 16, 2, 3), region(2000, 16, 16, 2, 7)});
  for (const std::int64_t stage : {-1, 0, 4, 8}) {
    try {
      static_cast<void>(layout.stage_index(stage));
      FAIL() << stage;
    } catch (const InvalidArgument& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find(std::to_string(stage)), std::string::npos) << message;
      EXPECT_NE(message.find("3 to 7"), std::string::npos) << message;
    }
  }
}

TEST(KVLayout, GeometryIsEverythingButAddressesAndStrides) {
  const KVLayout layout({region(1000, 16, 10, 4, 0), region(2000, 16, 16, 4, 1)});
  const KVLayout moved({region(9000, 64, 10, 4, 0), region(5000, 32, 16, 4, 1)});
  EXPECT_TRUE(layout.geometry_differences(moved).empty());

  const auto only_difference = [&](const KVLayout& other) {
    const auto differing = layout.geometry_differences(other);
    EXPECT_EQ(differing.size(), 1U);
    return differing.empty() ? std::string() : differing.front();
  };
  EXPECT_EQ(only_difference(KVLayout({region(1000, 16, 11, 4, 0), region(2000, 16, 16, 4, 1)})),
            "region 0: payload_bytes 10, stage 0 and 11, 0");
  EXPECT_EQ(only_difference(KVLayout({region(1000, 16, 10, 4, 0), region(2000, 16, 16, 4, 2)})),
            "region 1: payload_bytes 16, stage 1 and 16, 2");
  EXPECT_EQ(only_difference(KVLayout({region(1000, 16, 10, 5, 0), region(2000, 16, 16, 5, 1)})),
            "block_count: 4 and 5");
  EXPECT_EQ(only_difference(KVLayout({region(1000, 16, 10, 4, 0)})), "regions: 2 and 1");
  Region first = region(1000, 16, 10, 4, 0);
  Region second = region(2000, 16, 16, 4, 1);
  first.memory = second.memory = "cuda:1";
  EXPECT_EQ(only_difference(KVLayout({first, second})), "memory: host and cuda:1");
}

TEST(KVLayout, BlocksOutOfRangeOrTwiceAreNamed) {
  const KVLayout layout({region(1000, 16, 16, 4)});
  const auto message = [&](std::vector<BlockId> blocks, bool unique) -> std::string {
    try {
      layout.expect_blocks(blocks, unique);
      return {};
    } catch (const InvalidArgument& error) {
      return error.what();
    }
  };
  EXPECT_EQ(message({0, 3, 1}, true), "");
  EXPECT_EQ(message({0, 3, 3}, false), "");
  EXPECT_NE(message({0, 3, 3}, true).find("device block 3 stands twice"), std::string::npos);
  EXPECT_NE(message({0, 4}, false).find("device block 4"), std::string::npos);
  EXPECT_NE(message({0, -1}, false).find("device block -1"), std::string::npos);
  EXPECT_NE(message({std::numeric_limits<BlockId>::max()}, false), "");
}

}  // namespace
}  // namespace kvmem
