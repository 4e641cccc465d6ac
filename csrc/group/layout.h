// The protocol: what lies where in a rank's control segment, and what its words mean.
//
// Every rank has one control segment; all ranks of the group map all of them. A flag lies at the rank that awaits and
// clears it (plan::Flag::owner), progress words at the rank they tell of, the abort word of the whole group in rank 0's
// segment. Words are plain aligned integers: CPU threads use them as std::atomic, GPUs set and await the same words
// with stream memory operations at the offsets given here.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "../plan/plan.h"

namespace streamoverlap {

inline constexpr std::uint32_t kMagic = 0x534f5650;
inline constexpr std::uint32_t kProtocolVersion = 4;
inline constexpr int kMaxSlots = 64;
inline constexpr std::size_t kCacheLine = 64;

// Empty flags: 1 while the slot may be written by that peer. Full flags: 0, or the signature of the sender's call.
inline constexpr std::uint32_t kCreditValue = 1;

// The `running` word of a slot: 0 between calls; the call's signature from its start; signature | kReceived from just
// before the call returns its first credit. A signature has both bits clear.
//
// One word written with constants says it all, also in replays of a CUDA graph, where a counter would be baked in and
// go stale: the watchdog marks a value it has seen with kSeen, so a value that is still marked is of the very same
// call, while a newer call of the same kind has overwritten the mark.
//
// kReceived is needed to tell a mismatch from good speed: once a peer has its credit back it may set the flags of the
// slot's next call, with another signature, while this one still multiplies.
inline constexpr std::uint32_t kSeen = 1;
inline constexpr std::uint32_t kReceived = 2;
inline constexpr std::uint32_t kSignatureMask = ~(kSeen | kReceived);

// Calls by the group's own collective (serial) carry no flags: a rank tells which it makes in a word of these, call n
// in word n % kSerialCalls: n in the upper half, its signature in the lower. A rank that is that far ahead of a peer
// waits for it.
inline constexpr int kSerialCalls = 256;
// Likewise the growth of slots, for a call whose signature it is: all ranks take part, so one word will do.

// What rank 0 has chosen for all ranks, choice n in entry n % kChoices; see Group::agree. `stamp`: n in the upper half,
// the choice in the lower; `of`: what all ranks know of the call in the upper half, rank 0's own part in the lower. No
// rank is that far behind another one: streams do not take so much.
inline constexpr int kChoices = 4096;

enum class State : std::uint32_t { Open = 1, Closed = 2 };

enum class AbortKind : std::uint32_t { PeerTimeout = 1, Mismatch = 2, Aborted = 3 };

// Written once, by the rank whose claim of the abort word succeeded.
struct AbortRecord {
  AbortKind kind = AbortKind::Aborted;
  std::int32_t reporter = -1;
  std::int32_t culprit = -1;          // -1: not known
  std::uint32_t signature = 0;        // of the call that failed at the reporter
  std::uint32_t other_signature = 0;  // Mismatch: of the call of the culprit
  double elapsed = 0;                 // seconds
  char op[192] = {};                  // the reporter's call
  char cause[512] = {};               // completes "..., which", or the text of an exception
};

// Copies what fits, in whole UTF-8 characters; `to` is zeroed.
template <std::size_t N>
void set_text(char (&to)[N], const std::string& text) {
  std::size_t size = std::min(text.size(), N - 1);
  const auto continues = [&text](std::size_t i) { return (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80; };
  while (size > 0 && size < text.size() && continues(size)) --size;
  text.copy(to, size);
}

// The abort word.
inline constexpr std::uint32_t kAbortClaimed = 1;    // somebody is writing the record
inline constexpr std::uint32_t kAbortPublished = 2;  // the record can be read

using Word = std::atomic<std::uint32_t>;
using LongWord = std::atomic<std::uint64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "flags must be plain 32-bit words");
static_assert(LongWord::is_always_lock_free && sizeof(LongWord) == 8, "counters must be plain 64-bit words");

struct ChoiceEntry {
  LongWord stamp, of;
};

struct ControlHead {
  std::uint32_t magic, version, world, rank, slots, pid;

  alignas(kCacheLine) LongWord heartbeat;  // the watchdog's polls
  LongWord issued;                         // calls issued by the host
  Word state;                              // State

  alignas(kCacheLine) LongWord serial[kSerialCalls];
  LongWord growth;

  alignas(kCacheLine) ChoiceEntry choices[kChoices];  // used in rank 0's segment alone

  alignas(kCacheLine) Word abort;  // used in rank 0's segment alone
  AbortRecord record;
};

struct alignas(kCacheLine) SlotProgress {
  Word running;
  Word timeout_ms;   // of the running call; 0: the group's
  Word awaiting[2];  // by plan::FlagKind: the flag a host thread waits for, or 0 (diagnostics); see awaited_flag
};

// A flag of known kind and owner in a word of SlotProgress::awaiting; never 0.
inline std::uint32_t awaiting_value(const plan::Flag& flag) {
  return static_cast<std::uint32_t>(flag.index) << 8 | static_cast<std::uint32_t>(flag.setter() + 1);
}
inline int awaited_setter(std::uint32_t value) { return static_cast<int>(value & 0xff) - 1; }
inline plan::Flag awaited_flag(plan::FlagKind kind, int owner, std::uint32_t value) {
  const int setter = awaited_setter(value), index = static_cast<int>(value >> 8);
  return kind == plan::FlagKind::Full ? plan::Flag{kind, setter, owner, index} : plan::Flag{kind, owner, setter, index};
}
static_assert(plan::kMaxWorld < 0xff, "a rank must fit into 8 bits");

class Layout {
 public:
  Layout(int world, int slots) : world_(world), slots_(slots) {}

  int world() const { return world_; }
  int slots() const { return slots_; }
  int full_flags() const { return plan::full_flags_per_pair(world_); }  // of a (sender, receiver) pair

  std::size_t progress_offset(int slot) const { return sizeof(ControlHead) + slot * sizeof(SlotProgress); }
  std::size_t running_offset(int slot) const { return progress_offset(slot) + offsetof(SlotProgress, running); }
  std::size_t timeout_offset(int slot) const { return progress_offset(slot) + offsetof(SlotProgress, timeout_ms); }
  std::size_t empty_offset(int slot, int receiver) const {
    return progress_offset(slots_) + (std::size_t(slot) * world_ + receiver) * kCacheLine;
  }
  std::size_t full_offset(int slot, int sender, int index) const {
    return empty_offset(slots_, 0) + (std::size_t(slot) * world_ + sender) * full_row_bytes() + index * sizeof(Word);
  }
  // Where a flag lies in its owner's segment.
  std::size_t flag_offset(int slot, const plan::Flag& flag) const {
    return flag.kind == plan::FlagKind::Full ? full_offset(slot, flag.sender, flag.index)
                                             : empty_offset(slot, flag.receiver);
  }
  std::size_t bytes() const { return full_offset(slots_, 0, 0); }

 private:
  // Different senders write to different cache lines.
  std::size_t full_row_bytes() const {
    return (full_flags() * sizeof(Word) + kCacheLine - 1) / kCacheLine * kCacheLine;
  }

  int world_;
  int slots_;
};

// The value a flag has when it is set.
inline std::uint32_t set_value(const plan::Flag& flag, std::uint32_t signature) {
  return flag.kind == plan::FlagKind::Full ? signature : kCreditValue;
}

// A mapped control segment.
class Control {
 public:
  Control(std::byte* base, const Layout& layout) : base_(base), layout_(layout) {}

  // Lays down the first state in zeroed memory.
  void initialise(int rank);
  // Throws std::runtime_error if this is not rank `rank`'s segment of a group of this build and layout.
  void validate(int rank, std::size_t bytes) const;

  std::byte* base() const { return base_; }
  ControlHead& head() const { return *reinterpret_cast<ControlHead*>(base_); }
  SlotProgress& progress(int slot) const {
    return *reinterpret_cast<SlotProgress*>(base_ + layout_.progress_offset(slot));
  }
  Word& flag(int slot, const plan::Flag& flag) const { return word(layout_.flag_offset(slot, flag)); }
  Word& full(int slot, int sender, int index) const { return word(layout_.full_offset(slot, sender, index)); }
  Word& empty(int slot, int receiver) const { return word(layout_.empty_offset(slot, receiver)); }

 private:
  Word& word(std::size_t offset) const { return *reinterpret_cast<Word*>(base_ + offset); }

  std::byte* base_;
  Layout layout_;
};

}  // namespace streamoverlap
