#include "distributed/group.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/process_group.h"

// What can be asked of a handle.
namespace lockstep {

using distributed::require_group;

bool ProcessGroup::is_member() const {
  return require_group(*this, "is_member")->is_member();
}

int ProcessGroup::rank() const {
  return require_group(*this, "get_rank")->rank;
}

int ProcessGroup::size() const {
  const auto group = require_group(*this, "get_world_size");
  return group->is_member() ? group->world_size : -1;
}

std::vector<int> ProcessGroup::ranks() const {
  return require_group(*this, "get_process_group_ranks")->ranks;
}

std::string ProcessGroup::name() const {
  return require_group(*this, "name")->c10d_name;
}

std::string ProcessGroup::description() const {
  return require_group(*this, "description")->description;
}

std::string ProcessGroup::backend() const {
  return require_group(*this, "get_backend")->backend_name;
}

c10::intrusive_ptr<c10d::ProcessGroup> ProcessGroup::c10d() const {
  const auto group = require_group(*this, "c10d");
  if (!group->is_member()) {
    throw InvalidArgument("this rank does not belong to the group",
                          group->context("c10d"));
  }
  return group->process_group;
}

int get_rank(const ProcessGroup& group) {
  return group.rank();
}

int get_world_size(const ProcessGroup& group) {
  return group.size();
}

std::string get_backend(const ProcessGroup& group) {
  return group.backend();
}

std::vector<int> get_process_group_ranks(const ProcessGroup& group) {
  return group.ranks();
}

int get_group_rank(const ProcessGroup& handle, int global_rank) {
  const auto group = require_group(handle, "get_group_rank");
  if (const auto rank = group->rank_of(global_rank)) return *rank;
  throw InvalidArgument("global rank " + std::to_string(global_rank) +
                            " does not belong to the group; its members are " +
                            distributed::list_of(group->ranks),
                        group->context("get_group_rank"));
}

int get_global_rank(const ProcessGroup& handle, int group_rank) {
  const auto group = require_group(handle, "get_global_rank");
  if (group_rank >= 0 && group_rank < group->world_size) {
    return group->ranks[static_cast<size_t>(group_rank)];
  }
  throw InvalidArgument("the group has no rank " + std::to_string(group_rank) +
                            "; its ranks are 0 to " +
                            std::to_string(group->world_size - 1),
                        group->context("get_global_rank"));
}

c10::intrusive_ptr<c10d::ProcessGroup> get_group() {
  return ProcessGroup().c10d();
}

}  // namespace lockstep
