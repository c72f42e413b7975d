#include "lockstep/data/data_loader.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>

#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

using namespace std::chrono_literals;

struct Sample {
  int64_t index;
  std::string name;
};

/// Items by formula; every item counts in `reads`.
struct Squares {
  int64_t items = 20;
  std::shared_ptr<std::atomic<int>> reads =
      std::make_shared<std::atomic<int>>(0);

  int64_t size() const { return items; }
  std::tuple<at::Tensor, int> get(int64_t index) {
    ++*reads;
    // Later items are ready first, so that order is not by accident.
    std::this_thread::sleep_for((index % 3 == 0 ? 2 : 0) * 1ms);
    return {torch::full({3}, index), static_cast<int>(index * index)};
  }
};

struct FailsAt {
  int64_t bad;

  int64_t size() const { return 10; }
  int64_t get(int64_t index) const {
    if (index == bad) throw std::out_of_range("item " + std::to_string(index));
    return index;
  }
};

TEST(TensorDataset, GivesItemsAndBatches) {
  const auto x = torch::arange(12.).reshape({4, 3}).t().contiguous().t();
  const auto y = torch::arange(4);
  const auto dataset = TensorDataset(x, y);
  EXPECT_EQ(dataset.size(), 4);
  const auto [x2, y2] = dataset.get(2);
  EXPECT_TRUE(x2.equal(torch::tensor({6., 7., 8.})));
  EXPECT_EQ(y2.item<int64_t>(), 2);
  const auto [xs, ys] = dataset.get_batch(torch::tensor({3, 0}, torch::kLong));
  EXPECT_TRUE(xs.equal(torch::tensor({{9., 10., 11.}, {0., 1., 2.}})));
  EXPECT_TRUE(ys.equal(torch::tensor({3, 0}, torch::kLong)));
}

TEST(TensorDataset, BatchesDoNotAliasTheData) {
  const auto x = torch::zeros({4, 2});
  auto loader = DataLoader(TensorDataset(x), {.batch_size = 4});
  for (auto& [batch] : loader) batch.fill_(1);
  EXPECT_TRUE(x.equal(torch::zeros({4, 2})));
}

TEST(TensorDataset, GathersAsIndexSelectDoes) {
  const auto indices = torch::tensor({4, 0, 4, 2}, torch::kLong);
  const auto values = torch::arange(5 * 12).reshape({5, 3, 4});
  std::vector<at::Tensor> cases{
      values,
      values.transpose(1, 2),
      values.slice(2, 0, 4, 2),
      values.select(2, 1).select(1, 0),
      torch::zeros({5, 0}),
      torch::complex(values.to(torch::kFloat), values.to(torch::kFloat)).conj(),
      values.to(torch::kFloat).requires_grad_(),
  };
  for (const auto dtype : {torch::kByte,
                           torch::kHalf,
                           torch::kFloat,
                           torch::kDouble,
                           torch::kComplexDouble}) {
    cases.push_back(values.to(dtype));
    cases.push_back(torch::arange(5).to(dtype));
  }
  for (const auto& tensor : cases) {
    const auto [batch] = TensorDataset(tensor).get_batch(indices);
    const auto expected = tensor.index_select(0, indices);
    EXPECT_TRUE(batch.equal(expected)) << tensor;
    EXPECT_EQ(batch.sizes(), expected.sizes());
    EXPECT_EQ(batch.requires_grad(), expected.requires_grad());
  }
  EXPECT_EQ(TensorDataset(values).get_batch(indices.slice(0, 0, 0))[0].sizes(),
            (std::vector<int64_t>{0, 3, 4}));
  for (const int64_t outside : {-1, 5}) {
    EXPECT_THROW((void)TensorDataset(values).get_batch(
                     torch::tensor({outside}, torch::kLong)),
                 InvalidArgument);
  }
}

TEST(DataLoader, TheLongestTimeoutIsNoneThatHasPassed) {
  auto loader = DataLoader(
      TensorDataset(torch::arange(4)),
      {.num_workers = 1, .timeout = std::chrono::milliseconds::max()});
  int64_t sum = 0;
  for (auto& [x] : loader) sum += x.sum().item<int64_t>();
  EXPECT_EQ(sum, 6);
}

TEST(TensorDataset, RefusesWhatHasNoCommonSize) {
  EXPECT_THROW(TensorDataset(torch::zeros({3}), torch::zeros({4})),
               InvalidArgument);
  EXPECT_THROW(TensorDataset(torch::tensor(1.)), InvalidArgument);
  EXPECT_THROW(TensorDataset(torch::zeros({3}), at::Tensor()), InvalidArgument);
}

TEST(DataLoader, HandsOutTensorsInOrder) {
  const auto x = torch::arange(20).reshape({10, 2});
  const auto y = torch::arange(10.);
  auto loader = DataLoader(TensorDataset(x, y), {.batch_size = 4});
  EXPECT_EQ(loader.size(), 3);
  int64_t at = 0;
  for (auto& [inputs, labels] : loader) {
    const auto count = std::min<int64_t>(4, 10 - at);
    EXPECT_TRUE(inputs.equal(x.narrow(0, at, count)));
    EXPECT_TRUE(labels.equal(y.narrow(0, at, count)));
    at += count;
  }
  EXPECT_EQ(at, 10);
}

TEST(DataLoader, DropsTheLastBatch) {
  auto loader = DataLoader(TensorDataset(torch::arange(10)),
                           {.batch_size = 4, .drop_last = true});
  EXPECT_EQ(loader.size(), 2);
  int64_t batches = 0;
  for (auto& [x] : loader) {
    EXPECT_EQ(x.numel(), 4);
    ++batches;
  }
  EXPECT_EQ(batches, 2);
}

TEST(DataLoader, EmptyDataSetHasNoBatches) {
  auto loader = DataLoader(TensorDataset(torch::zeros({0, 3})),
                           {.batch_size = 4, .num_workers = 2});
  EXPECT_EQ(loader.size(), 0);
  EXPECT_TRUE(loader.begin() == loader.end());
}

class Workers : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(DataLoader, Workers, testing::Values(0, 1, 3));

TEST_P(Workers, KeepTheOrder) {
  Squares dataset;
  auto loader =
      DataLoader(dataset, {.batch_size = 3, .num_workers = GetParam()});
  static_assert(std::is_same_v<decltype(loader)::Batch,
                               std::tuple<at::Tensor, at::Tensor>>);
  for (int pass = 0; pass < 2; ++pass) {
    int64_t at = 0;
    for (auto& [x, y] : loader) {
      const auto i = torch::arange(at, std::min<int64_t>(at + 3, 20));
      EXPECT_TRUE(x.equal(i.unsqueeze(1).expand({-1, 3})));
      EXPECT_TRUE(y.equal(i * i));
      EXPECT_EQ(y.scalar_type(), torch::kLong);
      at += i.numel();
    }
    EXPECT_EQ(at, 20);
  }
  EXPECT_EQ(*dataset.reads, 40);
}

TEST_P(Workers, AnErrorArrivesAsItIsAtItsBatch) {
  auto loader =
      DataLoader(FailsAt{5}, {.batch_size = 2, .num_workers = GetParam()});
  for (int pass = 0; pass < 2; ++pass) {
    int64_t batches = 0;
    const auto read = [&] {
      for (auto& batch : loader) {
        EXPECT_EQ(batch[0].item<int64_t>(), 2 * batches);
        ++batches;
      }
    };
    try {
      read();
      ADD_FAILURE() << "no error";
    } catch (const std::out_of_range& error) {
      EXPECT_STREQ(error.what(), "item 5");
    }
    EXPECT_EQ(batches, 2);
  }
}

TEST_P(Workers, AnErrorEndsThePass) {
  auto loader =
      DataLoader(FailsAt{1}, {.batch_size = 1, .num_workers = GetParam()});
  auto it = loader.begin();
  EXPECT_THROW(++it, std::out_of_range);
  EXPECT_TRUE(it == loader.end());
  ++it;
  EXPECT_TRUE(it == loader.end());
}

TEST_P(Workers, APassMayEndAtAnyTime) {
  Squares dataset;
  auto loader =
      DataLoader(dataset, {.batch_size = 2, .num_workers = GetParam()});
  for (int64_t stop = 0; stop < loader.size(); ++stop) {
    int64_t batch = 0;
    for (auto& [x, y] : loader) {
      EXPECT_EQ(y[0].item<int64_t>(), 4 * batch * batch);
      if (batch++ == stop) break;
    }
  }
}

TEST_P(Workers, PassesMayOverlap) {
  auto loader =
      DataLoader(TensorDataset(torch::arange(4)), {.num_workers = GetParam()});
  std::vector<int64_t> seen;
  for (auto& [a] : loader) {
    for (auto& [b] : loader) {
      seen.push_back(a.item<int64_t>() * 4 + b.item<int64_t>());
    }
  }
  std::vector<int64_t> expected(16);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(seen, expected);
}

TEST(DataLoader, PrefetchesNoMoreThanAsked) {
  Squares dataset{.items = 100};
  auto loader = DataLoader(
      dataset, {.batch_size = 1, .num_workers = 2, .prefetch_factor = 3});
  const auto it = loader.begin();
  const auto deadline = std::chrono::steady_clock::now() + 10s;
  while (*dataset.reads < 7 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(1ms);
  }
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(*dataset.reads, 7);  // the one in hand and 2 x 3 ahead
}

TEST(DataLoader, AWorkerThatIsTooSlowIsATimeout) {
  struct Stuck {
    std::shared_ptr<std::atomic<bool>> release;
    int64_t size() const { return 2; }
    int64_t get(int64_t index) const {
      while (!*release) std::this_thread::sleep_for(1ms);
      return index;
    }
  };
  const auto release = std::make_shared<std::atomic<bool>>(false);
  {
    auto loader =
        DataLoader(Stuck{release}, {.num_workers = 1, .timeout = 30ms});
    EXPECT_THROW((void)loader.begin(), TimeoutError);
  }
  *release = true;
}

TEST(DataLoader, OperatorsInWorkersUseOneThread) {
  struct Threads {
    int64_t size() const { return 1; }
    int64_t get(int64_t) const { return at::get_num_threads(); }
  };
  at::set_num_threads(2);
  auto loader = DataLoader(Threads{}, {.num_workers = 1});
  for (auto& threads : loader) EXPECT_EQ(threads.item<int64_t>(), 1);
  EXPECT_EQ(at::get_num_threads(), 2);
}

TEST(DataLoader, SharesOrMovesADataSet) {
  struct MoveOnly {
    std::unique_ptr<int64_t> offset;
    int64_t size() const { return 2; }
    int64_t get(int64_t index) const { return *offset + index; }
  };
  auto moved = DataLoader(MoveOnly{std::make_unique<int64_t>(5)});
  for (auto& batch : moved) EXPECT_GE(batch.item<int64_t>(), 5);
  const auto shared = std::make_shared<Squares>();
  auto loader = DataLoader(shared, {.batch_size = 20});
  EXPECT_EQ(&loader.dataset(), shared.get());
  EXPECT_EQ(loader.size(), 1);
}

TEST(DataLoader, OtherItemsAreListedOrCollatedByTheUser) {
  struct Names {
    int64_t size() const { return 3; }
    Sample get(int64_t index) const {
      return {index, std::string(static_cast<size_t>(index + 1), 'x')};
    }
  };
  auto listed = DataLoader(Names{}, {.batch_size = 3});
  for (auto& batch : listed) {
    ASSERT_EQ(batch.size(), 3u);
    EXPECT_EQ(batch[2].name, "xxx");
  }
  auto joined =
      DataLoader(Names{}, {.batch_size = 3}, [](std::vector<Sample> samples) {
        std::string all;
        for (const auto& sample : samples) all += sample.name + ' ';
        return all;
      });
  for (auto& batch : joined) EXPECT_EQ(batch, "x xx xxx ");
}

TEST(DefaultCollate, FollowsPython) {
  const DefaultCollate collate;
  EXPECT_TRUE(
      collate(std::vector<float>{1, 2}).equal(torch::tensor({1.f, 2.f})));
  EXPECT_TRUE(
      collate(std::vector<double>{1, 2}).equal(torch::tensor({1., 2.})));
  EXPECT_TRUE(collate(std::vector<bool>{true, false})
                  .equal(torch::tensor({true, false})));
  EXPECT_TRUE(collate(std::vector<uint8_t>{1, 200})
                  .equal(torch::tensor({1, 200}, torch::kLong)));
  const auto [a, b] = collate(std::vector{std::pair(torch::zeros({2}), 1.f),
                                          std::pair(torch::ones({2}), 2.f)});
  EXPECT_TRUE(a.equal(torch::tensor({{0.f, 0.f}, {1.f, 1.f}})));
  EXPECT_TRUE(b.equal(torch::tensor({1.f, 2.f})));
  const auto columns = collate(std::vector<std::array<int, 2>>{{1, 2}, {3, 4}});
  EXPECT_TRUE(columns[1].equal(torch::tensor({2, 4}, torch::kLong)));
}

TEST(DataLoader, RefusesWrongArguments) {
  const auto make = [](DataLoaderOptions options, int64_t items = 4) {
    return DataLoader(TensorDataset(torch::arange(items)), std::move(options));
  };
  EXPECT_THROW(make({.batch_size = 0}), InvalidArgument);
  EXPECT_THROW(make({.num_workers = -1}), InvalidArgument);
  EXPECT_THROW(make({.num_workers = 1, .prefetch_factor = 0}), InvalidArgument);
  EXPECT_THROW(make({.timeout = 0ms}), InvalidArgument);
  EXPECT_THROW(make({.shuffle = true, .sampler = SequentialSampler(4)}),
               InvalidArgument);
  EXPECT_THROW(make({.shuffle = true}, 0), InvalidArgument);
  EXPECT_THROW(DataLoader(std::shared_ptr<Squares>()), InvalidArgument);
}

TEST(DataLoader, RefusesWhatASamplerMustNotReturn) {
  struct Fixed final : Sampler {
    at::Tensor order;
    explicit Fixed(at::Tensor t) : order(std::move(t)) {}
    at::Tensor next_pass() override { return order; }
    int64_t size() const override { return 2; }
  };
  const auto begin = [](const at::Tensor& order) {
    auto loader = DataLoader(TensorDataset(torch::arange(4)),
                             {.sampler = std::make_shared<Fixed>(order)});
    return *loader.begin();
  };
  EXPECT_EQ(begin(torch::tensor({3, 1}, torch::kLong))[0].item<int64_t>(), 3);
  EXPECT_THROW(begin(torch::tensor({3, 4}, torch::kLong)), InvalidArgument);
  EXPECT_THROW(begin(torch::tensor({-1, 1}, torch::kLong)), InvalidArgument);
  EXPECT_THROW(begin(torch::tensor({1., 2.})), InvalidArgument);
  EXPECT_THROW(begin(torch::arange(3)), InvalidArgument);
  EXPECT_THROW(begin(at::Tensor()), InvalidArgument);
}

}  // namespace
}  // namespace lockstep::data
