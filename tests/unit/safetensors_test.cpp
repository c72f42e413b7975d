#include "lockstep/checkpoint/safetensors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <thread>

#include "core/fd.h"
#include "lockstep/core/error.h"
#include "support/multiprocess.h"

namespace lockstep::checkpoint {
namespace {

using test::TempDir;

std::string file_of(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + header + data;
}

void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The names of everything in a folder.
std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void expect_same(const at::Tensor& a, const at::Tensor& b) {
  ASSERT_EQ(a.scalar_type(), b.scalar_type());
  ASSERT_EQ(a.sizes(), b.sizes());
  const auto x = a.contiguous();
  const auto y = b.contiguous();
  EXPECT_TRUE(x.nbytes() == 0 ||
              std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) ==
                  0);
}

class Dtypes : public testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Safetensors,
                         Dtypes,
                         testing::Values(at::kDouble,
                                         at::kFloat,
                                         at::kHalf,
                                         at::kBFloat16,
                                         at::kFloat8_e5m2,
                                         at::kFloat8_e4m3fn,
                                         at::kFloat8_e5m2fnuz,
                                         at::kFloat8_e4m3fnuz,
                                         at::kLong,
                                         at::kInt,
                                         at::kShort,
                                         at::kChar,
                                         at::kUInt64,
                                         at::kUInt32,
                                         at::kUInt16,
                                         at::kByte,
                                         at::kBool,
                                         at::kComplexFloat));

TEST_P(Dtypes, ComeBackBitForBit) {
  const TempDir dir;
  const auto values = torch::arange(24).remainder(7).to(GetParam());
  const Tensors tensors{
      {"row", values},
      {"odd", values.narrow(0, 0, 3)},
      {"transposed", values.reshape({4, 6}).t()},
      {"scalar", values[5]},
      {"empty", values.narrow(0, 0, 0).reshape({0, 3})},
      {"byte", torch::ones({1}, torch::kByte)},
  };
  save_file(tensors, dir / "t.safetensors");
  const auto loaded = load_file(dir / "t.safetensors");
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    expect_same(loaded.at(name), tensor);
  }
}

TEST(Safetensors, WritesTheFormat) {
  const TempDir dir;
  save_file({{"b", torch::tensor({1, 2}, torch::kByte)},
             {"a", torch::tensor({true})},
             {"w", torch::tensor({{1.f}, {2.f}})}},
            dir / "t.safetensors",
            {{"format", "pt"}});
  std::string header =
      R"({"__metadata__":{"format":"pt"},)"
      R"("w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
      R"("a":{"dtype":"BOOL","shape":[1],"data_offsets":[8,9]},)"
      R"("b":{"dtype":"U8","shape":[2],"data_offsets":[9,11]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::string data("\0\0\x80\x3f\0\0\0\x40\1\1\2", 11);
  EXPECT_EQ(read(dir / "t.safetensors"), file_of(header, data));
}

TEST(Safetensors, KeepsMetadata) {
  const TempDir dir;
  const Metadata metadata{{"epoch", "3"}, {"q\"uote", "\xc3\xa4\n"}};
  save_file({}, dir / "t.safetensors", metadata);
  EXPECT_EQ(load_metadata(dir / "t.safetensors"), metadata);
  EXPECT_TRUE(load_file(dir / "t.safetensors").empty());
}

TEST(Safetensors, LoadedTensorsOutliveTheFileAndMayBeWritten) {
  const TempDir dir;
  const auto path = dir / "t.safetensors";
  save_file({{"w", torch::zeros({4})}}, path);
  auto first = load_file(path);
  first.at("w").fill_(5);
  EXPECT_TRUE(load_file(path).at("w").equal(torch::zeros({4})));
  save_file({{"w", torch::ones({4})}}, path);
  std::filesystem::remove(path);
  EXPECT_TRUE(first.at("w").equal(torch::full({4}, 5.f)));
}

TEST(Safetensors, ReadsTensorsThatAreNotAligned) {
  const TempDir dir;
  write(dir / "t.safetensors",
        file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                R"("w":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})",
                std::string("\7\0\0\x80\x3f", 5)));
  EXPECT_EQ(load_file(dir / "t.safetensors").at("w").item<float>(), 1.f);
}

struct Malformed {
  const char* name;
  std::string file;
  const char* message;  ///< part of the error
};

std::string repeated(const std::string& text, int times) {
  std::string result;
  for (int i = 0; i < times; ++i) result += text;
  return result;
}

std::string entry(const std::string& fields) {
  return R"({"w":{)" + fields + "}}";
}

class MalformedFiles : public testing::TestWithParam<Malformed> {};

TEST_P(MalformedFiles, AreRefused) {
  const TempDir dir;
  const auto path = dir / "bad.safetensors";
  write(path, GetParam().file);
  try {
    (void)load_file(path);
    FAIL() << "no error";
  } catch (const CheckpointError& error) {
    EXPECT_NE(error.message().find(path), std::string::npos) << error.what();
    EXPECT_NE(error.message().find(GetParam().message), std::string::npos)
        << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Safetensors,
    MalformedFiles,
    testing::Values(
        Malformed{"Empty", "", "ends at byte 0"},
        Malformed{"NoLength", "1234567", "ends at byte 7"},
        Malformed{"HugeHeader",
                  std::string(8, '\xff') + "{}",
                  "claims 18446744073709551615 bytes"},
        Malformed{"HeaderPastTheEnd",
                  std::string("\x10\0\0\0\0\0\0\0{}", 10),
                  "extends to byte 24"},
        Malformed{"EmptyHeader", file_of("", ""), "does not begin with {"},
        Malformed{"NotAnObject", file_of("[]", ""), "does not begin with {"},
        Malformed{"NotJson", file_of(R"({"w":)", ""), "not JSON at byte"},
        Malformed{"TwoObjects", file_of("{}{}", ""), "not JSON at byte"},
        Malformed{"Zero",
                  file_of(std::string("{}\0x", 4), ""),
                  "zero in the header at byte 10"},
        Malformed{"NotUtf8", file_of("{\"\xff\":1}", ""), "not JSON at byte"},
        Malformed{"Deep",
                  file_of(R"({"w":)" + std::string(10'000, '['), ""),
                  "nests too deeply"},
        Malformed{"HugeNumber", file_of(R"({"w":1e999})", ""), "out of range"},
        Malformed{"TwiceTheSameName",
                  file_of(R"({"w":{"dtype":"U8","shape":[0],)"
                          R"("data_offsets":[0,0]},"w":{"dtype":"U8",)"
                          R"("shape":[0],"data_offsets":[0,0]}})",
                          ""),
                  R"(has "w" twice)"},
        Malformed{"TwiceTheSameField",
                  file_of(entry(R"("dtype":"U8","dtype":"F32","shape":[0],)"
                                R"("data_offsets":[0,0])"),
                          ""),
                  R"(has "dtype" twice)"},
        Malformed{"MetadataIsAList",
                  file_of(R"({"__metadata__":[]})", ""),
                  "__metadata__ is not an object"},
        Malformed{"MetadataIsANumber",
                  file_of(R"({"__metadata__":{"a":1}})", ""),
                  R"(__metadata__ "a" is not a string)"},
        Malformed{"TensorIsAList", file_of(R"({"w":[]})", ""), "tensor \"w\""},
        Malformed{"NoDtype",
                  file_of(entry(R"("shape":[1],"data_offsets":[0,1])"), "x"),
                  "dtype is missing"},
        Malformed{
            "DtypeIsANumber",
            file_of(entry(R"("dtype":1,"shape":[1],"data_offsets":[0,1])"),
                    "x"),
            "dtype is not a string"},
        Malformed{"NoShape",
                  file_of(entry(R"("dtype":"U8","data_offsets":[0,1])"), "x"),
                  "shape is missing"},
        Malformed{"NegativeShape",
                  file_of(entry(R"("dtype":"U8","shape":[-1],)"
                                R"("data_offsets":[0,1])"),
                          "x"),
                  "no whole number"},
        Malformed{"FractionalShape",
                  file_of(entry(R"("dtype":"U8","shape":[1.0],)"
                                R"("data_offsets":[0,1])"),
                          "x"),
                  "no whole number"},
        Malformed{"ShapeOverflows",
                  file_of(entry(R"("dtype":"F32",)"
                                R"("shape":[4294967296,4294967296,2],)"
                                R"("data_offsets":[0,0])"),
                          ""),
                  "shape is too large"},
        Malformed{"ShapeBeyondInt64",
                  file_of(entry(R"("dtype":"U8",)"
                                R"("shape":[0,18446744073709551615],)"
                                R"("data_offsets":[0,0])"),
                          ""),
                  "shape is too large"},
        Malformed{"EmptyShapeWithHugeStrides",
                  file_of(entry(R"("dtype":"U8","shape":[0,4294967296,)"
                                R"(4294967296],"data_offsets":[0,0])"),
                          ""),
                  "shape is too large"},
        Malformed{
            "TooManyDimensions",
            file_of(entry(R"("dtype":"U8","shape":[1)" + repeated(",1", 64) +
                          R"(],"data_offsets":[0,1])"),
                    "x"),
            "shape is too large"},
        Malformed{"WrongSize",
                  file_of(entry(R"("dtype":"F32","shape":[1],)"
                                R"("data_offsets":[0,3])"),
                          "xxx"),
                  "span 3 bytes, but dtype and shape need 4"},
        Malformed{"OneOffset",
                  file_of(entry(R"("dtype":"U8","shape":[1],)"
                                R"("data_offsets":[1])"),
                          "x"),
                  "not [begin, end]"},
        Malformed{"OffsetsBackwards",
                  file_of(entry(R"("dtype":"U8","shape":[1],)"
                                R"("data_offsets":[1,0])"),
                          "x"),
                  "not [begin, end]"},
        Malformed{"PastTheEnd",
                  file_of(entry(R"("dtype":"U8","shape":[2],)"
                                R"("data_offsets":[0,2])"),
                          "x"),
                  "end 1 bytes past the end of the file"},
        Malformed{"OffsetsAtTheLimit",
                  file_of(entry(R"("dtype":"U8","shape":[1],)"
                                R"("data_offsets":[18446744073709551614,)"
                                R"(18446744073709551615])"),
                          "x"),
                  "past the end of the file"},
        Malformed{"GapBefore",
                  file_of(entry(R"("dtype":"U8","shape":[1],)"
                                R"("data_offsets":[1,2])"),
                          "xx"),
                  "nothing covers"},
        Malformed{"GapAfter",
                  file_of(entry(R"("dtype":"U8","shape":[1],)"
                                R"("data_offsets":[0,1])"),
                          "xx"),
                  "no tensor covers"},
        Malformed{"Overlap",
                  file_of(R"({"a":{"dtype":"U8","shape":[2],)"
                          R"("data_offsets":[0,2]},"b":{"dtype":"U8",)"
                          R"("shape":[2],"data_offsets":[1,3]}})",
                          "xxx"),
                  "overlaps another one"},
        Malformed{"BoolOfTwo",
                  file_of(entry(R"("dtype":"BOOL","shape":[2],)"
                                R"("data_offsets":[0,2])"),
                          "\1\2"),
                  "is no BOOL"}),
    [](const auto& test) { return test.param.name; });

TEST(Safetensors, NamesADtypeItCannotHold) {
  const TempDir dir;
  write(dir / "t.safetensors",
        file_of(entry(R"("dtype":"F6_E2M3","shape":[4],)"
                      R"("data_offsets":[0,3])"),
                "xxx"));
  try {
    (void)load_file(dir / "t.safetensors");
    FAIL() << "no error";
  } catch (const Unsupported& error) {
    EXPECT_NE(error.message().find("F6_E2M3"), std::string::npos);
    EXPECT_NE(error.message().find("\"w\""), std::string::npos);
  }
}

TEST(Safetensors, AFileThatIsCutOffAnywhereIsRefused) {
  const TempDir dir;
  save_file({{"a", torch::ones({2, 3})}, {"b", torch::zeros({0})}},
            dir / "whole.safetensors");
  const auto whole = read(dir / "whole.safetensors");
  for (size_t size = 0; size < whole.size(); ++size) {
    write(dir / "cut.safetensors", whole.substr(0, size));
    EXPECT_THROW((void)load_file(dir / "cut.safetensors"), CheckpointError)
        << size;
  }
  write(dir / "long.safetensors", whole + "x");
  EXPECT_THROW((void)load_file(dir / "long.safetensors"), CheckpointError);
}

TEST(Safetensors, RefusesWhatItCannotRead) {
  const TempDir dir;
  EXPECT_THROW((void)load_file(dir / "none.safetensors"), CheckpointError);
  EXPECT_THROW((void)load_file(dir.path().string()), CheckpointError);
  const auto pipe = dir / "pipe.safetensors";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THROW((void)load_file(pipe), CheckpointError);
}

TEST(Safetensors, RefusesTensorsItCannotStore) {
  const TempDir dir;
  const auto save = [&](const std::string& name, const at::Tensor& tensor) {
    save_file({{name, tensor}}, dir / "t.safetensors");
  };
  EXPECT_THROW(save("w", at::Tensor()), InvalidArgument);
  EXPECT_THROW(save("w", torch::eye(2).to_sparse()), InvalidArgument);
  EXPECT_THROW(save("w", torch::zeros({1}, torch::kComplexDouble)),
               InvalidArgument);
  EXPECT_THROW(save("w", torch::zeros({1}, torch::kMeta)), InvalidArgument);
  EXPECT_THROW(save("__metadata__", torch::zeros({1})), InvalidArgument);
  EXPECT_THROW(save("\xff", torch::zeros({1})), InvalidArgument);
  EXPECT_TRUE(names_in(dir.path()).empty());
}

TEST(AtomicSave, MakesFoldersAndLeavesNothingElse) {
  const TempDir dir;
  save_file({{"w", torch::ones({1})}}, dir / "a/b/t.safetensors");
  EXPECT_EQ(names_in(dir.path() / "a/b"),
            (std::vector<std::string>{"t.safetensors"}));
}

TEST(AtomicSave, RemovesTheTemporariesOfDeadWritersOnly) {
  const TempDir dir;
  const auto stale = dir / ".t.safetensors.tmp-0123";
  const auto in_use = dir / ".t.safetensors.tmp-4567";
  const auto other = dir / ".u.safetensors.tmp-0123";
  for (const auto& path : {stale, in_use, other}) write(path, "x");
  ASSERT_EQ(mkfifo((dir / ".t.safetensors.tmp-89ab").c_str(), 0600), 0);
  const Fd writer(open(in_use.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(flock(writer.get(), LOCK_EX), 0);
  save_file({{"w", torch::ones({1})}}, dir / "t.safetensors");
  EXPECT_EQ(names_in(dir.path()),
            (std::vector<std::string>{".t.safetensors.tmp-4567",
                                      ".u.safetensors.tmp-0123",
                                      "t.safetensors"}));
}

TEST(AtomicSave, AFailureLeavesTheOldFileAlone) {
  const TempDir dir;
  const auto path = dir / "t.safetensors";
  save_file({{"w", torch::ones({1})}}, path);
  // A limit on the size of files stands in for a full disk.
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const rlimit small{100'000, old.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROW(save_file({{"w", torch::zeros({100'000})}}, path),
               CheckpointError);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(load_file(path).at("w").equal(torch::ones({1})));
  EXPECT_EQ(names_in(dir.path()), (std::vector<std::string>{"t.safetensors"}));
}

TEST(AtomicSave, KeepsTheModeAndTheLink) {
  const TempDir dir;
  const auto file = dir / "real.safetensors";
  const auto link = dir / "link.safetensors";
  save_file({{"w", torch::zeros({1})}}, file);
  ASSERT_EQ(chmod(file.c_str(), 0600), 0);
  std::filesystem::create_symlink("real.safetensors", link);
  save_file({{"w", torch::ones({1})}}, link);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_TRUE(load_file(file).at("w").equal(torch::ones({1})));
  EXPECT_EQ(
      std::filesystem::status(file).permissions(),
      std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
}

TEST(AtomicSave, RefusesAFolderAsItsTarget) {
  const TempDir dir;
  EXPECT_THROW(save_file({}, dir.path().string()), CheckpointError);
  write(dir / "file", "x");
  EXPECT_THROW(save_file({}, dir / "file/t.safetensors"), CheckpointError);
}

TEST(AtomicSave, ManyWritersOfOnePathLeaveOneWholeFile) {
  const TempDir dir;
  const auto path = dir / "t.safetensors";
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&, i] {
      for (int k = 0; k < 100; ++k) {
        save_file({{"w", torch::full({1000}, i)}}, path);
      }
    });
  }
  for (auto& writer : writers) writer.join();
  const auto w = load_file(path).at("w");
  EXPECT_TRUE(w.equal(w[0].expand({1000})));
  EXPECT_EQ(names_in(dir.path()), (std::vector<std::string>{"t.safetensors"}));
}

}  // namespace
}  // namespace lockstep::checkpoint
