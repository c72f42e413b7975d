#include "comm/liveness/channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/clock.h"

namespace lockstep::comm::liveness {
namespace {

/// Long enough for a busy peer; a stopped one must not delay the news for the
/// others.
constexpr std::chrono::milliseconds kSendLimit(100);

union ControlBuffer {
  cmsghdr align;
  char bytes[CMSG_SPACE(sizeof(int))];
};

}  // namespace

bool Channel::send(const Message& message, int descriptor) noexcept {
  Header header{.type = static_cast<uint32_t>(message.type),
                .rank = message.rank,
                .number = message.number,
                .length = message.text.size()};
  iovec parts[] = {
      {&header, sizeof header},
      {const_cast<char*>(message.text.data()), message.text.size()}};
  msghdr packet{};
  packet.msg_iov = parts;
  packet.msg_iovlen = 2;
  ControlBuffer control{};
  if (descriptor >= 0) {
    packet.msg_control = control.bytes;
    packet.msg_controllen = CMSG_LEN(sizeof(int));
    cmsghdr* entry = CMSG_FIRSTHDR(&packet);
    entry->cmsg_level = SOL_SOCKET;
    entry->cmsg_type = SCM_RIGHTS;
    entry->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(entry), &descriptor, sizeof descriptor);
  }

  const Deadline deadline(kSendLimit);
  bool begun = false;
  while (parts[0].iov_len + parts[1].iov_len > 0) {
    ssize_t sent =
        ::sendmsg(socket_.get(), &packet, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      pollfd room{.fd = socket_.get(), .events = POLLOUT, .revents = 0};
      if (errno == EAGAIN && !deadline.passed()) {
        ::poll(&room, 1, static_cast<int>(deadline.remaining().count()));
        continue;
      }
      // Half a message would garble what follows.
      if (begun) ::shutdown(socket_.get(), SHUT_RDWR);
      return false;
    }
    begun = true;
    packet.msg_control = nullptr;
    packet.msg_controllen = 0;
    for (auto& part : parts) {
      const auto step = std::min(part.iov_len, static_cast<size_t>(sent));
      part.iov_base = static_cast<char*>(part.iov_base) + step;
      part.iov_len -= step;
      sent -= static_cast<ssize_t>(step);
    }
  }
  return true;
}

Channel::Receipt Channel::fill(char* data, size_t size) {
  while (received_ < size) {
    iovec part{data + received_, size - received_};
    ControlBuffer control{};
    msghdr packet{};
    packet.msg_iov = &part;
    packet.msg_iovlen = 1;
    packet.msg_control = control.bytes;
    packet.msg_controllen = CMSG_LEN(sizeof(int));
    const ssize_t n =
        ::recvmsg(socket_.get(), &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return Receipt::Nothing;
    if (n <= 0) return Receipt::Closed;
    const cmsghdr* entry = CMSG_FIRSTHDR(&packet);
    if (entry != nullptr && entry->cmsg_level == SOL_SOCKET &&
        entry->cmsg_type == SCM_RIGHTS) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(entry), sizeof descriptor);
      descriptor_.reset(descriptor);
    }
    received_ += static_cast<size_t>(n);
  }
  received_ = 0;
  return Receipt::Message;
}

Channel::Receipt Channel::receive(Message& message, Fd& descriptor) {
  if (!have_header_) {
    const auto receipt =
        fill(reinterpret_cast<char*>(&header_), sizeof header_);
    if (receipt != Receipt::Message) return receipt;
    if (header_.length > kMaxText) return Receipt::Closed;
    have_header_ = true;
    text_.resize(header_.length);
  }
  const auto receipt = fill(text_.data(), text_.size());
  if (receipt != Receipt::Message) return receipt;
  have_header_ = false;
  message = {.type = static_cast<MessageType>(header_.type),
             .rank = header_.rank,
             .number = header_.number,
             .text = std::move(text_)};
  descriptor = std::move(descriptor_);
  return Receipt::Message;
}

}  // namespace lockstep::comm::liveness
