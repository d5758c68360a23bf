// Finding and loading the runtime.
#include "device/cuda/cudart.hpp"

#include <cstdlib>

#include "base/error.hpp"
#include "support/fake_cudart.hpp"

namespace kvmem::cuda {
namespace {

using test::FakeCudart;

// An environment variable for as long as this lives.
class Setting {
 public:
  Setting(const char* name, const std::string& value) : name_(name) {
    setenv(name, value.c_str(), 1);
  }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
  ~Setting() { unsetenv(name_); }

 private:
  const char* name_;
};

std::string refusal(const std::string& path) {
  try {
    static_cast<void>(load_cudart(path));
  } catch (const DeviceUnavailable& error) {
    return error.what();
  }
  ADD_FAILURE() << path << " was loaded";
  return {};
}

TEST(Cudart, BothMajorVersionsStandSideBySideEachWithItsOwnBatchedCopy) {
  const auto older = load_cudart(FakeCudart::path_of(12)),
             newer = load_cudart(FakeCudart::path_of(13));
  EXPECT_EQ(older->version, 12090);
  EXPECT_EQ(newer->version, 13000);
  // Public failure 159: one symbol, two argument lists.
  EXPECT_NE(older->call.memcpy_batch_12, nullptr);
  EXPECT_EQ(older->call.memcpy_batch_13, nullptr);
  EXPECT_EQ(newer->call.memcpy_batch_12, nullptr);
  EXPECT_NE(newer->call.memcpy_batch_13, nullptr);
  EXPECT_NE(older->call.malloc, newer->call.malloc);
  EXPECT_EQ(newer->path, FakeCudart::path_of(13));
}

TEST(Cudart, VersionsAreShownAsPeopleWriteThem) {
  EXPECT_EQ(version_text(12080), "12.8");
  EXPECT_EQ(version_text(13000), "13.0");
}

TEST(Cudart, WhatIsNotThereIsRefusedWithItsPath) {
  EXPECT_NE(refusal("/nowhere/libcudart.so.13").find("/nowhere/libcudart.so.13"),
            std::string::npos);
}

TEST(Cudart, ALibraryThatIsNoRuntimeIsRefusedWithWhatItLacks) {
  const std::string why = refusal("libm.so.6");
  EXPECT_NE(why.find("libm.so.6"), std::string::npos);
  EXPECT_NE(why.find("cudaRuntimeGetVersion"), std::string::npos);
}

TEST(CudartSearch, ThePathThatIsSetComesFirstAndAlone) {
  const Setting setting("KVMEM_CUDART_PATH", FakeCudart::path_of(12));
  CudartSearch search({FakeCudart::path_of(13)});
  const auto found = search.next();
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->version, 12090);
  EXPECT_EQ(found->found_by, "KVMEM_CUDART_PATH");
  EXPECT_EQ(search.next(), nullptr);
}

TEST(CudartSearch, ThePathThatIsSetMustLoad) {
  const Setting setting("KVMEM_CUDART_PATH", "/nowhere/libcudart.so");
  EXPECT_THROW(CudartSearch({FakeCudart::path_of(13)}), DeviceUnavailable);
}

TEST(CudartSearch, AnEmptySettingIsNone) {
  const Setting setting("KVMEM_CUDART_PATH", "");
  EXPECT_NO_THROW(CudartSearch({}));
}

TEST(CudartSearch, WhatTheProcessHasLoadedComesBeforeWheels) {
  const FakeCudart loaded(12);
  CudartSearch search({FakeCudart::path_of(13)});
  const auto found = search.next();
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->found_by, "process");
  std::string last;
  while (const auto further = search.next()) last = further->found_by;
  EXPECT_FALSE(last.empty());
}

TEST(CudartSearch, AWheelThatCannotBeLoadedIsPassedOverAndNamed) {
  CudartSearch search({"/nowhere/libcudart.so.13", FakeCudart::path_of(13)});
  bool found = false;
  while (const auto candidate = search.next()) found |= candidate->version == 13000;
  EXPECT_TRUE(found);
  EXPECT_NE(search.why().find("/nowhere/libcudart.so.13"), std::string::npos);
}

}  // namespace
}  // namespace kvmem::cuda
