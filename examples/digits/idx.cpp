#include "idx.h"

#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <vector>

namespace {

uint32_t read_big_endian(std::istream& in) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | (in.get() & 0xff);
  return value;
}

}  // namespace

torch::Tensor read_idx(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot open " + path);
  // Two zero bytes, the type (8: unsigned byte), the number of dimensions.
  const auto magic = read_big_endian(in);
  if (magic >> 8 != 8) {
    throw std::runtime_error(path + " is not an IDX file of bytes");
  }
  std::vector<int64_t> shape(magic & 0xff);
  for (auto& size : shape) size = read_big_endian(in);
  auto data = torch::empty(shape, torch::kByte);
  in.read(static_cast<char*>(data.data_ptr()), data.numel());
  if (!in) throw std::runtime_error(path + " is cut off");
  return data;
}
