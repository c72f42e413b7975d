// Files of ours in Python's safetensors package, and the reverse.

#include "lockstep/checkpoint/checkpoint.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "lockstep/checkpoint/safetensors.h"
#include "support/multiprocess.h"
#include "support/python.h"

namespace lockstep {
namespace {

using test::TempDir;

/// As tensors() in checkpoint_files.py.
checkpoint::Tensors tensors() {
  const auto values = (torch::arange(24) * 37).remainder(11) - 3;
  const auto square = values.reshape({4, 6}).to(torch::kFloat);
  const auto floats = values.to(torch::kFloat);
  const auto natural = values + 3;
  return {
      {"f64", values.to(torch::kDouble) / 8},
      {"f32", square / 8},
      {"f16", values.to(torch::kHalf) / 8},
      {"bf16", values.to(torch::kBFloat16) / 8},
      {"i64", values},
      {"i32", values.to(torch::kInt)},
      {"i16", values.to(torch::kShort)},
      {"i8", values.to(torch::kChar)},
      {"u8", natural.to(torch::kByte)},
      {"u16", natural.to(torch::kUInt16)},
      {"u32", natural.to(torch::kUInt32)},
      {"u64", natural.to(torch::kUInt64)},
      {"bool", values > 0},
      {"c64", torch::complex(floats, -floats)},
      {"f8_e4m3", floats.to(torch::kFloat8_e4m3fn)},
      {"f8_e5m2", floats.to(torch::kFloat8_e5m2)},
      {"scalar", torch::tensor(2.5f)},
      {"empty", torch::zeros({0, 3})},
      {"transposed", square.t()},
  };
}

TEST(CheckpointInterop, PythonReadsOurFile) {
  const TempDir dir;
  checkpoint::save_file(
      tensors(), dir / "t.safetensors", {{"origin", "\xc3\xa4"}});
  EXPECT_NO_THROW(
      test::run_python("checkpoint_files.py", {"read", dir / "t.safetensors"}));
}

TEST(CheckpointInterop, WeReadPythonsFile) {
  const TempDir dir;
  test::run_python("checkpoint_files.py", {"write", dir / "t.safetensors"});
  const auto loaded = checkpoint::load_file(dir / "t.safetensors");
  const auto expected = tensors();
  ASSERT_EQ(loaded.size(), expected.size());
  for (const auto& [name, want] : expected) {
    const auto& got = loaded.at(name);
    EXPECT_EQ(got.scalar_type(), want.scalar_type()) << name;
    ASSERT_EQ(got.sizes(), want.sizes()) << name;
    EXPECT_TRUE(want.numel() == 0 ||
                got.reshape({-1})
                    .view(torch::kByte)
                    .equal(want.reshape({-1}).view(torch::kByte)))
        << name;
  }
  EXPECT_EQ(checkpoint::load_metadata(dir / "t.safetensors"),
            (checkpoint::Metadata{{"origin", "\xc3\xa4"}}));
}

TEST(CheckpointInterop, PythonRunsOurModel) {
  const TempDir dir;
  auto net = torch::nn::Sequential(torch::nn::Linear(4, 3),
                                   torch::nn::BatchNorm1d(3),
                                   torch::nn::Linear(3, 2));
  const auto inputs = torch::arange(8).reshape({2, 4}).to(torch::kFloat);
  net->forward(inputs);  // moves the buffers
  save(net, dir / "net.safetensors");
  net->eval();
  const auto ours = net->forward(inputs);
  const auto python = nlohmann::json::parse(test::run_python(
      "checkpoint_files.py", {"module", dir / "net.safetensors"}));
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t k = 0; k < 2; ++k) {
      EXPECT_NEAR(ours[i][k].item<double>(), python[i][k].get<double>(), 1e-6);
    }
  }
}

}  // namespace
}  // namespace lockstep
