// A fuzz target without a fuzzer, where only a compiler is there:
//
//   driver SEED RUNS FILE...
//
// Takes inputs from files, changes them at random and runs them, the same ones for the same seed. It sees nothing
// of what they reach; libFuzzer does (make fuzz). Where one fails, its number is told and its bytes.

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
extern "C" void __sanitizer_set_death_callback(void (*callback)());

namespace {

using Bytes = std::vector<uint8_t>;
Bytes input;
long long number = 0;

void tell() {
  fprintf(stderr, "driver: input %lld, %zu bytes:", number, input.size());
  for (const uint8_t byte : input) fprintf(stderr, " %02x", byte);
  fputc('\n', stderr);
}

// splitmix64: the same numbers everywhere.
uint64_t state;
uint64_t draw(uint64_t below) {
  uint64_t z = state += 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return (z ^ z >> 31) % below;
}

void change(const std::vector<Bytes> &seeds) {
  static constexpr uint8_t kEdges[] = {0x00, 0xff, 0x7f, 0x80, 0x01, 0x40};
  const size_t at = input.empty() ? 0 : draw(input.size());
  switch (input.empty() ? 5 : draw(7)) {
  case 0: input[at] ^= static_cast<uint8_t>(1u << draw(8)); break;
  case 1: input[at] = static_cast<uint8_t>(draw(256)); break;
  case 2: input[at] = kEdges[draw(sizeof kEdges)]; break;
  case 3: input[draw(input.size() < 16 ? input.size() : 16)] = static_cast<uint8_t>(draw(256)); break; // what chooses
  case 4: input.erase(input.begin() + static_cast<long>(at), input.begin() + static_cast<long>(at + draw(input.size() - at) / 4)); break;
  case 5:
    for (uint64_t more = 1 + draw(40); more > 0; --more) input.push_back(static_cast<uint8_t>(draw(256)));
    break;
  default: { // the end of another
    const Bytes &other = seeds[draw(seeds.size())];
    for (size_t i = at; i < input.size() && i < other.size(); ++i) input[i] = other[i];
  }
  }
}

} // namespace

int main(int argc, char **argv) {
  if (argc < 4) return fprintf(stderr, "usage: driver SEED RUNS FILE...\n"), 2;
  state = strtoull(argv[1], nullptr, 10);
  const long long runs = strtoll(argv[2], nullptr, 10);
  std::vector<Bytes> seeds;
  for (int i = 3; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) return fprintf(stderr, "driver: cannot read %s\n", argv[i]), 2;
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  __sanitizer_set_death_callback(tell);
  std::signal(SIGABRT, [](int) { tell(); });
  for (; number < runs; ++number) {
    const auto unchanged = static_cast<long long>(seeds.size());
    input = seeds[number < unchanged ? static_cast<size_t>(number) : draw(seeds.size())];
    for (uint64_t times = number < unchanged ? 0 : 1 + draw(6); times > 0; --times) change(seeds);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  printf("driver: %lld inputs as they should be\n", number);
  return 0;
}
