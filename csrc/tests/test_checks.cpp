// Wrong tables are refused by their own status, and nothing is written.
#include <algorithm>

#include "arena.h"
#include "cuda.h"
#include "expect.h"

namespace {

using Call = mht_status (*)(const mht_copy_table* table, int32_t threads, int64_t* row);

class Case {
 public:
  Case() : random_(1), memory_(200, 0, &random_), packed_(44, 0, &random_) {
    copies[0] = mht_copy{memory_.address(), 0, 4, 1, 0, {{8, 5, -1}}};
    copies[1] = mht_copy{memory_.address() + 100, 20, 4, 2, 0, {{0, 3, 0}, {8, 2, -1}}};
    range = mht_range{memory_.address(), 200};
    table = mht_copy_table{sizeof(mht_copy_table), MHT_CHECK_OVERLAP, copies, 2, offsets, 3, packed_.address(), 44,
                           &range, 1};
    before_memory_ = memory_.bytes();
    before_packed_ = packed_.bytes();
  }

  bool is_refused(Call call, mht_status status, int64_t row) {
    int64_t found = 99;
    const mht_status answer = call(&table, 2, &found);
    const bool is_whole = memory_.bytes() == before_memory_ && packed_.bytes() == before_packed_;
    return answer == status && found == row && is_whole && call(&table, 1, nullptr) == status;
  }

  int64_t offsets[3] = {40, 0, 20};
  mht_copy copies[2];
  mht_range range;
  mht_copy_table table;

 private:
  mht::Random random_;
  mht::Block memory_;
  mht::Block packed_;
  std::vector<char> before_memory_;
  std::vector<char> before_packed_;
};

#define REFUSED(call, change, status, row)          \
  do {                                              \
    Case c;                                         \
    change;                                         \
    EXPECT(c.is_refused(call, status, row));        \
  } while (false)

void check_arguments() {
  REFUSED(mht_gather, c.table.struct_bytes -= 8, MHT_WRONG_STRUCT_SIZE, -1);
  REFUSED(mht_gather, c.table.flags = 2, MHT_INVALID_ARGUMENT, -1);
  REFUSED(mht_gather, c.table.copies = nullptr, MHT_INVALID_ARGUMENT, -1);
  REFUSED(mht_gather, c.table.offsets = nullptr, MHT_INVALID_ARGUMENT, -1);
  REFUSED(mht_gather, c.table.ranges = nullptr, MHT_INVALID_ARGUMENT, -1);
  REFUSED(mht_gather, c.table.copy_count = -1, MHT_INVALID_ARGUMENT, -1);
  REFUSED(mht_gather, c.table.offset_count = -1, MHT_INVALID_ARGUMENT, -1);
  REFUSED(mht_gather, c.table.range_count = -1, MHT_INVALID_ARGUMENT, -1);
  REFUSED(mht_gather, c.table.packed_address = 0, MHT_INVALID_ARGUMENT, -1);
  REFUSED(mht_gather, c.table.packed_bytes = INT64_MAX, MHT_OVERFLOW, -1);
  REFUSED(mht_gather, c.table.packed_address = c.range.address + 199, MHT_PACKED_IN_RANGES, -1);
  REFUSED(mht_clear, c.range.bytes = INT64_MAX, MHT_OVERFLOW, -1);
  REFUSED(mht_clear, c.table.range_count = 0, MHT_OUTSIDE_RANGES, 0);
  EXPECT(mht_gather(nullptr, 1, nullptr) == MHT_INVALID_ARGUMENT);
  Case c;
  EXPECT(mht_gather(&c.table, 0, nullptr) == MHT_INVALID_ARGUMENT);
}

void check_copies() {
  REFUSED(mht_gather, c.copies[1].axis_count = 7, MHT_BAD_COPY, 1);
  REFUSED(mht_gather, c.copies[1].axis_count = INT32_MIN, MHT_BAD_COPY, 1);
  REFUSED(mht_gather, c.copies[1].run_bytes = 0, MHT_BAD_COPY, 1);
  REFUSED(mht_gather, c.copies[1].axes[1].count = INT32_MIN, MHT_BAD_COPY, 1);
  REFUSED(mht_gather, c.copies[1].axes[0].list = INT32_MIN, MHT_BAD_LIST, 1);
  REFUSED(mht_gather, c.copies[1].axes[0].list = INT32_MAX, MHT_BAD_LIST, 1);
  REFUSED(mht_gather, c.copies[1].axes[0].count = INT32_MAX, MHT_BAD_LIST, 1);
  REFUSED(mht_gather, c.copies[1].axes[1].stride = INT64_MIN, MHT_OUTSIDE_RANGES, 1);
  REFUSED(mht_gather, (c.copies[1].axes[1].stride = INT64_MIN, c.copies[1].axes[1].count = 3), MHT_OVERFLOW, 1);
  REFUSED(mht_gather, c.copies[1].run_bytes = INT64_MAX, MHT_OVERFLOW, 1);
  REFUSED(mht_gather, c.offsets[2] = INT64_MAX, MHT_OVERFLOW, 1);
  REFUSED(mht_gather, c.offsets[2] = INT64_MIN, MHT_OUTSIDE_RANGES, 1);
  REFUSED(mht_gather, c.copies[1].packed_offset = INT64_MIN, MHT_OUTSIDE_PACKED, 1);
  REFUSED(mht_gather, c.copies[1].packed_offset = INT64_MAX, MHT_OUTSIDE_PACKED, 1);
  REFUSED(mht_gather, c.copies[1].packed_offset = 19, MHT_PACKED_OVERLAP, 1);
  REFUSED(mht_gather, c.copies[0].packed_offset = 1, MHT_PACKED_OVERLAP, 1);
  REFUSED(mht_scatter, c.copies[1].axes[1].stride = 3, MHT_MEMORY_OVERLAP, 1);
  REFUSED(mht_scatter, c.offsets[2] = 0, MHT_MEMORY_OVERLAP, 1);
}

// Sums in the middle of a table may leave 64 bits where the addresses do not.
void check_far_offsets() {
  Case c;
  int64_t far[] = {INT64_MAX / 2, INT64_MAX / 2 + 16};
  c.table.offsets = far;
  c.table.offset_count = 2;
  c.table.copy_count = 1;
  c.copies[0] = mht_copy{c.range.address - INT64_MAX / 2, 0, 8, 2, 0, {{16, 1, -1}, {0, 2, 0}}};
  EXPECT(mht_scatter(&c.table, 1, nullptr) == MHT_OK);
  EXPECT(mht_gather(&c.table, 1, nullptr) == MHT_OK);
}

void check_statuses() {
  for (mht_status status = MHT_NOT_READY; status <= MHT_OK; ++status) {
    EXPECT(strcmp(mht_status_text(status), "unknown status") != 0);
  }
  EXPECT(strcmp(mht_status_text(MHT_NOT_READY - 1), "unknown status") == 0);
  EXPECT(mht_struct_bytes(3) == sizeof(mht_copy_table) && mht_struct_bytes(4) == 0 && mht_struct_bytes(-1) == 0);
  EXPECT(mht_abi_version() == MHT_ABI_VERSION);
}

}  // namespace

int main() {
  check_arguments();
  check_copies();
  check_far_offsets();
  check_statuses();
  return mht::failures;
}
