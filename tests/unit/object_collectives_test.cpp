// Collectives of C++ objects, over every backend that threads can use.

#include "lockstep/distributed/object_collectives.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/distributed/new_group.h"
#include "lockstep/testing/run_ranks.h"
#include "support/thread_backends.h"

namespace lockstep {
namespace {

constexpr int kRanks = 3;

/// A user's own type.
struct Score {
  std::string name;
  double value;
  bool operator==(const Score&) const = default;
};

/// Longer for higher ranks, so that sizes differ.
Score score_of(int rank) {
  return {std::string(static_cast<size_t>(1 + rank * 1000), 'x'), rank * 0.5};
}

}  // namespace

template <>
struct Serializer<Score> {
  static void write(ByteWriter& writer, const Score& value) {
    Serializer<std::string>::write(writer, value.name);
    Serializer<double>::write(writer, value.value);
  }
  static Score read(ByteReader& reader) {
    auto name = Serializer<std::string>::read(reader);
    return {std::move(name), Serializer<double>::read(reader)};
  }
};

namespace {

class ObjectCollectives : public ::testing::TestWithParam<std::string> {
 protected:
  void run(const std::function<void(int rank)>& fn) const {
    testing::run_ranks(kRanks, fn, {.backend = GetParam()});
  }
};

INSTANTIATE_TEST_SUITE_P(Backends,
                         ObjectCollectives,
                         ::testing::ValuesIn(thread_backends()),
                         [](const auto& parameter) { return parameter.param; });

TEST_P(ObjectCollectives, AllGather) {
  run([](int rank) {
    std::vector<Score> scores = {score_of(7)};  // is replaced
    all_gather_object(scores, score_of(rank));
    EXPECT_EQ(scores, (std::vector{score_of(0), score_of(1), score_of(2)}));
    std::vector<int> numbers;
    all_gather_object(numbers, rank * 10);
    EXPECT_EQ(numbers, (std::vector{0, 10, 20}));
  });
}

TEST_P(ObjectCollectives, Gather) {
  run([](int rank) {
    std::vector<Score> scores;
    gather_object(score_of(rank), scores, {.dst = 1});
    if (rank == 1) {
      EXPECT_EQ(scores, (std::vector{score_of(0), score_of(1), score_of(2)}));
    } else {
      EXPECT_TRUE(scores.empty());
    }
  });
}

TEST_P(ObjectCollectives, Broadcast) {
  run([](int rank) {
    std::vector<Score> scores;
    if (rank == 2) scores = {score_of(4), score_of(5)};
    broadcast_object_list(scores, {.src = 2});
    EXPECT_EQ(scores, (std::vector{score_of(4), score_of(5)}));
    std::vector<std::string> none = {"replaced"};
    if (rank == 0) none.clear();
    broadcast_object_list(none);
    EXPECT_TRUE(none.empty());
  });
}

TEST_P(ObjectCollectives, Scatter) {
  run([](int rank) {
    Score own{};
    std::vector<Score> all;
    if (rank == 1) all = {score_of(3), score_of(0), score_of(6)};
    scatter_object_list(own, all, {.src = 1});
    EXPECT_EQ(own, score_of((std::vector{3, 0, 6})[static_cast<size_t>(rank)]));
  });
}

TEST_P(ObjectCollectives, ValuesOfDifferentTypes) {
  run([](int rank) {
    std::vector<c10::IValue> values;
    if (rank == 0) {
      c10::Dict<std::string, at::Tensor> state;
      state.insert("weight", torch::arange(6).view({2, 3}));
      values = {c10::IValue(7), c10::IValue("text"), c10::IValue(state)};
    }
    broadcast_object_list(values);
    ASSERT_EQ(values.size(), 3U);
    EXPECT_EQ(values[0].toInt(), 7);
    EXPECT_EQ(values[1].toStringRef(), "text");
    const auto state = values[2].toGenericDict();
    EXPECT_TRUE(
        state.at("weight").toTensor().equal(torch::arange(6).view({2, 3})));
  });
}

TEST_P(ObjectCollectives, TensorsOfDifferentShapes) {
  run([](int rank) {
    std::vector<at::Tensor> all;
    all_gather_object(all, torch::full({rank, 2}, rank, torch::kBFloat16));
    ASSERT_EQ(all.size(), 3U);
    for (int r = 0; r < kRanks; ++r) {
      const auto& got = all[static_cast<size_t>(r)];
      EXPECT_EQ(got.scalar_type(), torch::kBFloat16);
      EXPECT_TRUE(got.equal(torch::full({r, 2}, r, torch::kBFloat16)));
    }
  });
}

TEST_P(ObjectCollectives, InAGroupOfSomeRanks) {
  run([](int rank) {
    const auto pair = new_group({0, 2});
    std::vector<int> numbers = {-1};
    all_gather_object(numbers, rank, {.group = pair});
    EXPECT_EQ(numbers, rank == 1 ? std::vector{-1} : (std::vector{0, 2}));
    std::vector<int> list = {rank};
    broadcast_object_list(list, {.src = 2, .group = pair});
    EXPECT_EQ(list, std::vector{rank == 1 ? 1 : 2});
  });
}

TEST_P(ObjectCollectives, WrongArguments) {
  run([](int rank) {
    int own = 0;
    std::vector<int> numbers;
    EXPECT_THROW(gather_object(1, numbers, {.dst = 3}), InvalidArgument);
    EXPECT_THROW(broadcast_object_list(numbers, {.src = -1}), InvalidArgument);
    if (rank == 0) {
      EXPECT_THROW(scatter_object_list(own, {1, 2}), InvalidArgument);
    }
  });
}

TEST(ObjectSerializer, RefusesWhatIsNoValue) {
  ByteWriter writer;
  Serializer<std::string>::write(writer, "nonsense");
  ByteReader reader(writer.bytes());
  EXPECT_THROW(Serializer<c10::IValue>::read(reader), InvalidArgument);

  ByteWriter number;
  Serializer<c10::IValue>::write(number, c10::IValue(3));
  ByteReader again(number.bytes());
  EXPECT_THROW(Serializer<at::Tensor>::read(again), InvalidArgument);
}

}  // namespace
}  // namespace lockstep
