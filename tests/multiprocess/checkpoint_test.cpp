// A process that is killed while it saves.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <iostream>
#include <random>
#include <thread>

#include "lockstep/checkpoint/safetensors.h"
#include "support/multiprocess.h"

namespace lockstep::checkpoint {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kElements = 5 << 20;  // 20 MB

void save_state(const std::string& path, float value) {
  save_file({{"w", torch::full({kElements}, value)}}, path);
}

LOCKSTEP_PROCESS(save) {
  const auto tensors = Tensors{{"w", torch::full({kElements}, 2.f)}};
  std::cout << "saving" << std::endl;
  save_file(tensors, std::getenv("CHECKPOINT"));
  std::cout << "saved" << std::endl;
  return 0;
}

TEST(CheckpointKill, LeavesTheOldStateOrTheNew) {
  const test::TempDir dir;
  const auto path = dir / "t.safetensors";
  std::mt19937 random(1);
  int killed = 0;
  for (int round = 0; round < 50; ++round) {
    save_state(path, 1.f);
    test::Process saver(test::at_entry("save", {{"CHECKPOINT", path}}));
    ASSERT_TRUE(saver.wait_for_output("saving"));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
    saver.signal(SIGKILL);
    const auto result = saver.wait();
    killed += result.signal == SIGKILL;

    const auto w = load_file(path).at("w");
    const auto state = w[0].item<float>();
    EXPECT_TRUE(state == 1.f || state == 2.f);
    EXPECT_TRUE(result.out.find("saved") == std::string::npos || state == 2.f);
    EXPECT_TRUE(w.equal(torch::full({kElements}, state)));
  }
  EXPECT_GT(killed, 0);
  save_state(path, 1.f);
  const std::filesystem::directory_iterator folder(dir.path());
  EXPECT_EQ(std::distance(begin(folder), end(folder)), 1);
}

}  // namespace
}  // namespace lockstep::checkpoint
