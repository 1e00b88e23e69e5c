// The fuzzer where there is no libFuzzer: see kUsage. Every input that makes the library fail ends
// in SIGABRT, on which it is saved.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <ctime>
#include <fstream>
#include <iterator>

#include "target.h"

// Both sanitizers end in SIGABRT.
extern "C" const char* __asan_default_options();
const char* __asan_default_options() { return "abort_on_error=1:detect_leaks=1"; }
extern "C" const char* __ubsan_default_options();
const char* __ubsan_default_options() {
  return "abort_on_error=1:halt_on_error=1:print_stacktrace=1";
}

namespace fuzz {
namespace {

constexpr char kUsage[] =
    "usage: fuzz                             runs the input that comes on stdin (AFL)\n"
    "       fuzz FILE|FOLDER...              runs these inputs\n"
    "       fuzz --seconds N [--seed S] [--save FOLDER] [FILE|FOLDER...]\n"
    "                                        runs inputs at random and changed ones; N = 0: until\n"
    "                                        one fails, which is saved\n"
    "       fuzz --make-corpus FOLDER        writes the seed corpus anew\n";
constexpr unsigned kLongest = 60;  // seconds of an input
constexpr size_t kMostBytesOfInput = 1024;

using Bytes = std::vector<uint8_t>;

// What the signal handler saves.
struct Current {
  const uint8_t* data;
  size_t size;
  char program[512], path[512];
} current;

void write_text(const char* text) {
  if (write(2, text, std::strlen(text)) < 0) _exit(2);
}

void save_input(int signal) {
  if (current.path[0]) {
    const int file = open(current.path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0 || write(file, current.data, current.size) < 0) write_text("cannot write ");
    const char* const texts[] = {signal == SIGALRM ? "too slow: " : "",
                                 "the input is saved; again: ",
                                 current.program,
                                 " ",
                                 current.path,
                                 "\n"};
    for (const char* text : texts) write_text(text);
  }
  _exit(1);
}

Round run(const Bytes& input) {
  // Exactly as large, so that the fuzzer itself reads no further.
  const std::unique_ptr<uint8_t, Free> copy(static_cast<uint8_t*>(std::malloc(input.size() + 1)));
  std::copy(input.begin(), input.end(), copy.get());
  current.data = copy.get();
  current.size = input.size();
  alarm(kLongest);
  Round round = run_input(copy.get(), input.size());
  alarm(0);
  return round;
}

Bytes read_all(std::istream& stream) {
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

void read_inputs(const std::string& path, std::vector<Bytes>* inputs) {
  DIR* const folder = opendir(path.c_str());
  if (!folder) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "cannot read %s\n", path.c_str());
      std::exit(2);
    }
    inputs->push_back(read_all(file));
    return;
  }
  std::vector<std::string> names;
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] != '.') names.push_back(path + "/" + entry->d_name);
  }
  closedir(folder);
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) read_inputs(name, inputs);
}

Bytes random_input(Numbers* numbers) {
  Bytes bytes(64 + numbers->next() % 448);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(numbers->next());
  // A careful caller in half of the inputs, and few rare choices at the start.
  if (numbers->next() % 2) bytes[0] = 0;
  return bytes;
}

Bytes changed(Bytes bytes, const std::vector<Bytes>& corpus, Numbers* numbers) {
  for (uint64_t times = 1 + numbers->next() % 6; times > 0; --times) {
    const size_t at = bytes.empty() ? 0 : numbers->next() % bytes.size();
    const auto place = bytes.begin() + static_cast<int64_t>(at);
    const uint8_t value = static_cast<uint8_t>(numbers->next());
    switch (numbers->next() % 5) {
      case 0:
        if (!bytes.empty()) bytes[at] = value;
        break;
      case 1:
        if (!bytes.empty()) bytes[at] ^= static_cast<uint8_t>(1 << value % 8);
        break;
      case 2: bytes.insert(place, value); break;
      case 3:
        if (!bytes.empty()) bytes.erase(place);
        break;
      default: {  // the end of another one
        const Bytes& other = corpus[numbers->next() % corpus.size()];
        bytes.resize(at);
        if (at < other.size()) {
          bytes.insert(bytes.end(), other.begin() + static_cast<int64_t>(at), other.end());
        }
      }
    }
  }
  if (bytes.size() > kMostBytesOfInput) bytes.resize(kMostBytesOfInput);
  return bytes;
}

void run_for(double seconds, uint64_t seed, const std::vector<Bytes>& corpus) {
  Numbers numbers(seed);
  uint64_t count = 0, computed = 0, calls = 0;
  const time_t start = std::time(nullptr);
  for (; seconds == 0 || std::difftime(std::time(nullptr), start) < seconds; ++count) {
    const bool change = !corpus.empty() && numbers.next() % 2;
    const Round round =
        run(change ? changed(corpus[numbers.next() % corpus.size()], corpus, &numbers)
                   : random_input(&numbers));
    const uint32_t done =
        round.deeds & (kForward | kBackward | kMerge | kDropoutMask | kAppend | kQuantize);
    computed += done != 0;
    for (uint32_t bits = done; bits; bits &= bits - 1) ++calls;
  }
  std::printf("%" PRIu64 " inputs, %" PRIu64 " of them computed, %" PRIu64 " calls\n", count,
              computed, calls);
  // Else the minute says nothing.
  if (computed < count / 4) {
    std::fprintf(stderr, "too few inputs are computed\n");
    std::exit(1);
  }
}

// What the seed corpus shows, an input each.
struct Wanted {
  const char* name;
  bool (*found)(const Round& round);
};

bool did(const Round& round, uint32_t deed) { return round.deeds & deed; }
bool with(const Round& r, uint32_t deed, uint32_t layout, uint32_t mask, uint32_t bias,
          uint32_t features) {
  return did(r, deed) && r.last.batch > 1 && r.last.seqlen_q > 1 && r.last.seqlen_kv > 1 &&
         r.seen.layout == layout && (r.seen.mask & mask) == mask && (r.seen.bias & bias) == bias &&
         (r.seen.features & features) == features;
}

// Several tiles of queries and of keys.
bool large(const Round& r) { return r.last.seqlen_q > 128 && r.last.seqlen_kv > 128; }

const Wanted kWanted[] = {
    {"forward", [](const Round& r) { return with(r, kForward, 0, 0, 0, 0); }},
    {"forward_lse_sink", [](const Round& r) { return with(r, kForward, 0, 0, 0, 3); }},
    {"forward_masks", [](const Round& r) { return with(r, kForward, 0, 7, 0, 0); }},
    {"forward_blocks", [](const Round& r) { return with(r, kForward, 0, 16, 0, 0); }},
    {"forward_biases", [](const Round& r) { return with(r, kForward, 0, 0, 3, 0); }},
    {"forward_varlen", [](const Round& r) { return with(r, kForward, 3, 0, 0, 0); }},
    {"forward_paged", [](const Round& r) { return with(r, kForward, 4, 0, 0, 0); }},
    {"forward_paged_varlen", [](const Round& r) { return with(r, kForward, 5, 0, 0, 0); }},
    {"forward_latent", [](const Round& r) { return with(r, kForward, 8, 0, 0, 0); }},
    {"forward_latent_paged", [](const Round& r) { return with(r, kForward, 12, 0, 0, 0); }},
    {"forward_starts",
     [](const Round& r) { return with(r, kForward, 0, 0, 0, 0) && r.last.starts_kv; }},
    {"forward_dropout",
     [](const Round& r) { return with(r, kForward, 0, 0, 0, 0) && r.seen.dropout > 0; }},
    {"forward_splits",
     [](const Round& r) { return with(r, kForward, 0, 0, 0, 0) && r.seen.splits > 1; }},
    {"forward_tree", [](const Round& r) { return with(r, kForward, 0, 32, 0, 0); }},
    {"forward_hidden_pages", [](const Round& r) { return with(r, kForward, 4, 64, 0, 0); }},
    {"forward_e4m3",
     [](const Round& r) {
       return with(r, kForward, 0, 0, 0, 0) && r.seen.dtype == FLASHATTN_DTYPE_F8E4M3 &&
              r.last.descale_q.data && r.last.descale_k.data;
     }},
    {"forward_scaled_o",
     [](const Round& r) {
       return with(r, kForward, 0, 0, 0, 0) && r.seen.dtype_o == FLASHATTN_DTYPE_F8E4M3 &&
              r.last.scale_o.data && r.last.amax_o.data;
     }},
    {"forward_large", [](const Round& r) { return with(r, kForward, 0, 0, 0, 0) && large(r); }},
    {"backward", [](const Round& r) { return with(r, kBackward, 0, 0, 0, 0); }},
    {"backward_large", [](const Round& r) { return with(r, kBackward, 0, 0, 0, 0) && large(r); }},
    {"backward_large_masks",
     [](const Round& r) { return with(r, kBackward, 0, 2, 0, 0) && large(r); }},
    {"backward_all", [](const Round& r) { return with(r, kBackward, 0, 1, 3, 28); }},
    {"backward_varlen", [](const Round& r) { return with(r, kBackward, 3, 1, 0, 0); }},
    {"backward_e4m3",
     [](const Round& r) {
       return with(r, kBackward, 0, 0, 0, 0) && r.seen.dtype == FLASHATTN_DTYPE_F8E4M3;
     }},
    {"backward_starts",
     [](const Round& r) { return with(r, kBackward, 2, 0, 0, 0) && r.last.starts_kv; }},
    {"merge", [](const Round& r) { return did(r, kMerge) && did(r, kForward); }},
    {"dropout_mask", [](const Round& r) { return did(r, kDropoutMask) && r.seen.dropout > 0; }},
    {"quantize", [](const Round& r) { return did(r, kQuantize) && did(r, kForward); }},
    {"refused_plan", [](const Round& r) { return did(r, kRefusedPlan); }},
    {"refused_call", [](const Round& r) { return did(r, kRefusedCall); }},
};

// Whether the plan that an input asks for could show it: few do, and to compute takes long.
bool promises(const Bytes& bytes, const Wanted& wanted) {
  Input in(bytes.data(), bytes.size());
  in.careless = in.one_in(3);
  const Request request = draw_request(&in);
  Round round{};
  round.deeds = ~0u;
  round.seen = request.desc;
  round.last.batch = request.sizes.batch;
  round.last.seqlen_q = request.sizes.seqlen_q;
  round.last.seqlen_kv = request.sizes.seqlen_kv;
  int32_t given = 0;
  round.last.starts_kv = &given;
  for (flashattn_tensor* tensor :
       {&round.last.descale_q, &round.last.descale_k, &round.last.scale_o, &round.last.amax_o}) {
    tensor->data = &given;
  }
  return wanted.found(round);
}

// As short as it still shows the same, zeros where they do.
Bytes reduced(Bytes bytes, const Wanted& wanted) {
  for (size_t step = bytes.size() / 2; step > 0; step /= 2) {
    while (bytes.size() > step) {
      const Bytes shorter(bytes.begin(), bytes.end() - static_cast<int64_t>(step));
      if (!wanted.found(run(shorter))) break;
      bytes = shorter;
    }
  }
  for (uint8_t& byte : bytes) {
    const uint8_t before = byte;
    byte = 0;
    if (before != 0 && !wanted.found(run(bytes))) byte = before;
  }
  return bytes;
}

void make_corpus(const std::string& folder) {
  for (const Wanted& wanted : kWanted) {
    Numbers numbers(42);
    Bytes bytes = random_input(&numbers);
    while (!promises(bytes, wanted) || !wanted.found(run(bytes))) bytes = random_input(&numbers);
    bytes = reduced(bytes, wanted);
    std::ofstream file(folder + "/" + wanted.name + ".bin", std::ios::binary);
    for (const uint8_t byte : bytes) file.put(static_cast<char>(byte));
    if (!file.flush()) {
      std::fprintf(stderr, "cannot write into %s\n", folder.c_str());
      std::exit(1);
    }
    std::printf("%s: %zu bytes\n", wanted.name, bytes.size());
  }
}

int main_of(int argc, char** argv) {
  double seconds = -1;
  uint64_t seed = static_cast<uint64_t>(std::time(nullptr)) ^ static_cast<uint64_t>(getpid()) << 32;
  std::string save = ".";
  std::vector<Bytes> inputs;
  bool any = false;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool option = word.rfind("--", 0) == 0;
    if (option && i + 1 == argc) {
      std::fputs(kUsage, stderr);
      return 2;
    }
    if (word == "--seconds") {
      seconds = std::atof(argv[++i]);
    } else if (word == "--seed") {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (word == "--save") {
      save = argv[++i];
    } else if (word == "--make-corpus") {
      make_corpus(argv[++i]);
      return 0;
    } else if (option) {
      std::fputs(kUsage, stderr);
      return 2;
    } else {
      any = true;
      read_inputs(word, &inputs);
    }
  }
  std::snprintf(current.program, sizeof current.program, "%s", argv[0]);
  if (seconds < 0 && !any) {
    std::ios::sync_with_stdio(false);
    std::ifstream standard("/dev/stdin", std::ios::binary);
    run(read_all(standard));
    return 0;
  }
  for (const Bytes& input : inputs) run(input);
  if (seconds < 0) return 0;
  std::printf("--seed %" PRIu64 "\n", seed);
  std::fflush(stdout);
  std::snprintf(current.path, sizeof current.path, "%s/crash-%" PRIu64 ".bin", save.c_str(), seed);
  run_for(seconds, seed, inputs);
  return 0;
}

}  // namespace
}  // namespace fuzz

int main(int argc, char** argv) {
  signal(SIGABRT, fuzz::save_input);
  signal(SIGALRM, fuzz::save_input);
  return fuzz::main_of(argc, argv);
}
