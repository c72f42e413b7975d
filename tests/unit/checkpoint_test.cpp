#include "lockstep/checkpoint/checkpoint.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/checkpoint/safetensors.h"
#include "support/multiprocess.h"

namespace lockstep {
namespace {

using test::TempDir;

torch::nn::Sequential make_net() {
  return torch::nn::Sequential(
      torch::nn::Linear(4, 3),
      torch::nn::BatchNorm1d(3),
      torch::nn::Linear(torch::nn::LinearOptions(3, 2).bias(false)));
}

struct Tied : torch::nn::Module {
  struct Decoder : torch::nn::Module {
    explicit Decoder(const at::Tensor& shared)
        : weight(register_parameter("weight", shared)),
          bias(register_parameter("bias", torch::zeros({3}))) {}
    at::Tensor weight;
    at::Tensor bias;
  };
  torch::nn::Linear encoder =
      register_module("encoder", torch::nn::Linear(3, 3));
  std::shared_ptr<Decoder> decoder =
      register_module("decoder", std::make_shared<Decoder>(encoder->weight));
};

std::vector<std::string> names(const checkpoint::Tensors& tensors) {
  std::vector<std::string> result;
  for (const auto& [name, tensor] : tensors) result.push_back(name);
  return result;
}

void expect_same_state(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto compare = [](const auto& x, const auto& y) {
    ASSERT_EQ(x.size(), y.size());
    for (const auto& item : x) {
      EXPECT_TRUE(item.value().equal(y[item.key()])) << item.key();
    }
  };
  compare(a.named_parameters(), b.named_parameters());
  compare(a.named_buffers(), b.named_buffers());
}

TEST(Checkpoint, RefusesASparseBuffer) {
  struct Sparse : torch::nn::Module {
    at::Tensor mask = register_buffer("mask", torch::eye(2).to_sparse());
  };
  const TempDir dir;
  EXPECT_THROW(save(Sparse(), dir / "net.safetensors"), InvalidArgument);
}

TEST(Checkpoint, StoresParametersAndBuffersUnderPythonsNames) {
  const TempDir dir;
  save(make_net(), dir / "net.safetensors");
  EXPECT_EQ(names(checkpoint::load_file(dir / "net.safetensors")),
            (std::vector<std::string>{"0.bias",
                                      "0.weight",
                                      "1.bias",
                                      "1.num_batches_tracked",
                                      "1.running_mean",
                                      "1.running_var",
                                      "1.weight",
                                      "2.weight"}));
}

TEST(Checkpoint, LoadsIntoTheExistingTensors) {
  const TempDir dir;
  const auto path = dir / "net.safetensors";
  auto source = make_net();
  source->forward(torch::arange(8.).reshape({2, 4}));  // moves the buffers
  save(*source, path);

  auto target = make_net();
  const auto weight = target->parameters()[0];
  const auto result = load(target, path);
  EXPECT_TRUE(result.missing.empty());
  EXPECT_TRUE(result.unexpected.empty());
  expect_same_state(*source, *target);
  EXPECT_TRUE(weight.equal(source->parameters()[0]));
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_TRUE(weight.is_leaf());

  load(target.ptr(), path);
  load(*target, path);
  expect_same_state(*source, *target);
}

TEST(Checkpoint, ConvertsTheDtypeOnLoad) {
  const TempDir dir;
  auto source = torch::nn::Linear(2, 2);
  source->to(torch::kDouble);
  save(source, dir / "net.safetensors");
  auto target = torch::nn::Linear(2, 2);
  load(target, dir / "net.safetensors");
  EXPECT_EQ(target->weight.scalar_type(), torch::kFloat);
  EXPECT_TRUE(target->weight.equal(source->weight.to(torch::kFloat)));
}

TEST(Checkpoint, NamesAllThatDoesNotFitAndCopiesNothing) {
  const TempDir dir;
  const auto path = dir / "net.safetensors";
  checkpoint::save_file({{"weight", torch::zeros({3, 2})},
                         {"extra", torch::zeros({1})},
                         {"other", torch::zeros({1})}},
                        path);
  auto net = torch::nn::Linear(3, 2);
  const auto before = net->bias.clone();
  try {
    load(net, path);
    FAIL() << "no error";
  } catch (const CheckpointError& error) {
    EXPECT_EQ(error.message(),
              '"' + path +
                  "\" does not fit the module; missing in the file: \"bias\"; "
                  "not in the module: \"extra\", \"other\"; of another shape: "
                  "\"weight\" ([3, 2] in the file, [2, 3] in the module)");
  }
  EXPECT_TRUE(net->bias.equal(before));
  // Another shape is an error without strict, too.
  EXPECT_THROW(load(net, path, {.strict = false}), CheckpointError);
}

TEST(Checkpoint, WithoutStrictLoadsWhatFits) {
  const TempDir dir;
  const auto path = dir / "net.safetensors";
  checkpoint::save_file(
      {{"weight", torch::ones({2, 3})}, {"extra", torch::zeros({1})}}, path);
  auto net = torch::nn::Linear(3, 2);
  const auto result = load(net, path, {.strict = false});
  EXPECT_EQ(result.missing, (std::vector<std::string>{"bias"}));
  EXPECT_EQ(result.unexpected, (std::vector<std::string>{"extra"}));
  EXPECT_TRUE(net->weight.equal(torch::ones({2, 3})));
}

TEST(Checkpoint, TiedTensorsAreStoredOnce) {
  const TempDir dir;
  const auto path = dir / "net.safetensors";
  const auto source = std::make_shared<Tied>();
  save(source, path);
  EXPECT_EQ(names(checkpoint::load_file(path)),
            (std::vector<std::string>{
                "decoder.bias", "decoder.weight", "encoder.bias"}));
  EXPECT_EQ(checkpoint::load_metadata(path),
            (checkpoint::Metadata{{"encoder.weight", "decoder.weight"},
                                  {"format", "pt"}}));

  const auto tied = std::make_shared<Tied>();
  load(tied, path);
  expect_same_state(*source, *tied);
  EXPECT_TRUE(tied->encoder->weight.is_same(tied->decoder->weight));
}

TEST(Checkpoint, AnAliasFillsAModuleThatIsNotTied) {
  const TempDir dir;
  const auto path = dir / "net.safetensors";
  const auto source = std::make_shared<Tied>();
  save(source, path);
  struct Untied : torch::nn::Module {
    torch::nn::Linear encoder =
        register_module("encoder", torch::nn::Linear(3, 3));
    torch::nn::Linear decoder =
        register_module("decoder", torch::nn::Linear(3, 3));
  };
  const auto untied = std::make_shared<Untied>();
  load(untied, path);
  EXPECT_TRUE(untied->encoder->weight.equal(source->encoder->weight));
  EXPECT_TRUE(untied->decoder->weight.equal(source->encoder->weight));
}

TEST(Checkpoint, TheEndingChoosesTheFormat) {
  const TempDir dir;
  auto net = torch::nn::Linear(1, 1);
  for (const auto* ending : {".pt", ".pth", ".bin"}) {
    EXPECT_THROW(save(net, dir / "net" + ending), Unsupported);
    EXPECT_THROW(load(net, dir / "net" + ending), Unsupported);
  }
  for (const auto* name : {"net", "net.onnx", "net.safetensors.old"}) {
    EXPECT_THROW(save(net, dir / name), InvalidArgument);
    EXPECT_THROW(load(net, dir / name), InvalidArgument);
  }
}

TEST(Checkpoint, RefusesAnEmptyPointer) {
  const TempDir dir;
  torch::nn::Linear none = nullptr;
  EXPECT_THROW(save(none, dir / "net.safetensors"), InvalidArgument);
  EXPECT_THROW(load(none, dir / "net.safetensors"), InvalidArgument);
}

}  // namespace
}  // namespace lockstep
