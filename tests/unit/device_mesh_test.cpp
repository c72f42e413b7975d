#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/device_mesh.h"
#include "lockstep/distributed/new_group.h"
#include "lockstep/testing/run_ranks.h"

namespace lockstep {
namespace {

using Ranks = std::vector<int>;
using Sizes = std::vector<int64_t>;

template <class F>
void expect_invalid(F&& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "no error; expected one with \"" << part << '"';
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
        << error.what();
  }
}

at::Tensor ints(const Ranks& values) {
  return torch::tensor(values, at::kInt);
}

TEST(DeviceMesh, OfTwoDimensions) {
  testing::run_ranks(4, [](int rank) {
    const auto mesh =
        init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
    EXPECT_EQ(mesh.device_type(), "cpu");
    EXPECT_EQ(mesh.ndim(), 2);
    EXPECT_EQ(mesh.shape(), (Sizes{2, 2}));
    EXPECT_EQ(mesh.size(), 4);
    EXPECT_EQ(mesh.size(1), 2);
    EXPECT_EQ(mesh.size("dp"), 2);
    EXPECT_EQ(mesh.get_rank(), rank);
    EXPECT_EQ(mesh.mesh_dim_names(), (std::vector<std::string>{"dp", "tp"}));
    EXPECT_TRUE(mesh.mesh().equal(torch::arange(4, at::kInt).view({2, 2})));
    EXPECT_EQ(mesh.get_coordinate(), (Sizes{rank / 2, rank % 2}));
    EXPECT_EQ(mesh.get_local_rank("dp"), rank / 2);
    EXPECT_EQ(mesh.get_local_rank(1), rank % 2);
    EXPECT_EQ(mesh.get_group("dp").ranks(), (Ranks{rank % 2, rank % 2 + 2}));
    EXPECT_EQ(mesh.get_group(-1).ranks(), (Ranks{rank & 2, (rank & 2) + 1}));
    EXPECT_EQ(mesh.get_group("dp").description(), "mesh_dp");
    EXPECT_EQ(mesh.get_all_groups().size(), 2U);

    const auto tp = mesh["tp"];
    EXPECT_EQ(tp.get_group().name(), mesh.get_group("tp").name());
    EXPECT_EQ(tp.get_local_rank(), rank % 2);
    EXPECT_TRUE(tp.mesh().equal(ints({rank & 2, (rank & 2) + 1})));
    EXPECT_EQ((mesh[{"dp", "tp"}].shape()), (Sizes{2, 2}));

    auto tensor = torch::full(3, rank);
    all_reduce(tensor, {.group = tp.get_group()});
    EXPECT_TRUE(tensor.eq(2 * (rank & 2) + 1).all().item<bool>());

    const auto flat = mesh.flatten();
    EXPECT_EQ(flat.mesh_dim_names(), std::vector<std::string>{"dp_tp"});
    EXPECT_EQ(flat.get_coordinate(), Sizes{rank});
    EXPECT_EQ(mesh.get_group("dp_tp").size(), 4);
    EXPECT_EQ(mesh["dp_tp"].get_local_rank(), rank);
    EXPECT_EQ(mesh.flatten().get_group().name(), flat.get_group().name());
    EXPECT_EQ(tp.flatten().get_group().name(), tp.get_group().name());
  });
}

TEST(DeviceMesh, OfSomeRanksInAnyOrder) {
  testing::run_ranks(4, [](int rank) {
    const DeviceMesh mesh("cpu", torch::tensor({{3}, {1}}));
    EXPECT_EQ(mesh.shape(), (Sizes{2, 1}));
    EXPECT_TRUE(mesh.mesh().equal(ints({3, 1}).view({2, 1})));
    EXPECT_EQ(mesh.get_group(0).description(), "mesh_dim_0");
    if (rank % 2 == 0) {
      EXPECT_EQ(mesh.get_coordinate(), std::nullopt);
      EXPECT_FALSE(mesh.get_group(0).is_member());
      EXPECT_EQ(mesh.get_local_rank(1), -1);
    } else {
      EXPECT_EQ(mesh.get_coordinate(), (Sizes{rank == 3 ? 0 : 1, 0}));
      EXPECT_EQ(mesh.get_group(0).ranks(), (Ranks{1, 3}));
      EXPECT_EQ(mesh.get_group(1).ranks(), Ranks{rank});
    }
  });
}

TEST(DeviceMesh, FromGroups) {
  testing::run_ranks(4, [](int rank) {
    const auto rows = new_subgroups_by_enumeration({{0, 1}, {2, 3}}).current;
    const auto columns = new_subgroups_by_enumeration({{0, 2}, {1, 3}}).current;
    const auto one = DeviceMesh::from_group(rows, "cpu");
    EXPECT_EQ(one.get_group().name(), rows.name());
    EXPECT_TRUE(one.mesh().equal(ints(rows.ranks())));
    EXPECT_EQ(one.get_coordinate(), Sizes{rank % 2});
    const auto grid = torch::arange(4).view({2, 2});
    const auto two = DeviceMesh::from_group(
        {columns, rows}, "cpu", grid, {.mesh_dim_names = {"dp", "tp"}});
    EXPECT_EQ(two["tp"].get_group().name(), rows.name());
    EXPECT_EQ(two.get_local_rank("dp"), rank / 2);
    expect_invalid(
        [&] {
          (void)DeviceMesh::from_group({columns, rows}, "cpu", grid, {});
        },
        "mesh_dim_names must be given");
    expect_invalid(
        [&] {
          (void)DeviceMesh::from_group(
              {rows}, "cpu", grid, {.mesh_dim_names = {"dp", "tp"}});
        },
        "1 groups are given for a mesh of 2 dimensions");
  });
}

TEST(DeviceMesh, WrongArguments) {
  testing::run_ranks(2, [](int) {
    const auto make = [](const Sizes& shape,
                         const std::vector<std::string>& names) {
      return [=] {
        (void)init_device_mesh("cpu", shape, {.mesh_dim_names = names});
      };
    };
    expect_invalid(make({3}, {}), "3 ranks; there are 2");
    expect_invalid(make({2, 0}, {}), "size 0");
    expect_invalid(make({}, {}), "mesh_shape is empty");
    expect_invalid(make({2}, {"a", "b"}), "one per dimension is needed, 1");
    expect_invalid(make({2, 1}, {"a", "a"}), "twice");
    expect_invalid([] { (void)init_device_mesh("cuda:0", {2}); }, "cuda:0");
    for (const auto& ranks : {Ranks{0, 0}, Ranks{0, 2}, Ranks{-1}}) {
      expect_invalid([&] { DeviceMesh("cpu", ints(ranks)); }, "of the mesh");
    }
    expect_invalid([] { DeviceMesh("cpu", torch::ones(2)); }, "integer");
    const auto plain = init_device_mesh("cpu", {2, 1});
    expect_invalid([&] { (void)plain["dp"]; }, "without mesh_dim_names");
    expect_invalid([&] { (void)plain.flatten(); }, "without mesh_dim_names");
    expect_invalid([&] { (void)plain.get_group(); }, "mesh_dim is needed");
    expect_invalid([&] { (void)plain.get_group(2); }, "no dimension 2");
    expect_invalid([&] { (void)plain.get_group("dp"); }, "no dimension \"dp\"");
    const auto named =
        init_device_mesh("cpu", {2, 1}, {.mesh_dim_names = {"dp", "tp"}});
    expect_invalid([&] { (void)named["pp"]; }, "no dimension \"pp\"");
    expect_invalid([&] { (void)named[{"tp", "dp"}]; }, "out of order");
    expect_invalid([&] { (void)named[{"dp", "dp"}]; }, "overlap");
    expect_invalid([&] { (void)named.flatten("dp"); }, "\"dp\" already");
  });
}

}  // namespace
}  // namespace lockstep
