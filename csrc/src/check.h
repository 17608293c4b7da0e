// Whether a table may be carried out; nothing is written before it has been checked as a whole.
#ifndef MHT_SRC_CHECK_H_
#define MHT_SRC_CHECK_H_

#include <vector>

#include "index.h"

namespace mht {

// Where a share of the work begins: at a byte of what one copy moves.
struct Piece {
  int64_t copy;
  int64_t byte;
};

struct Checked {
  int64_t bytes = 0;
  std::vector<Piece> pieces;  // every `piece_bytes`, the first at the beginning
};

// `row` gets the number of the copy at fault, or -1.
//
// Throws std::bad_alloc.
mht_status check_table(const mht_copy_table& table, Operation operation, int64_t piece_bytes, Checked* found,
                       int64_t* row);

// Whether no byte of memory belongs to two segments; exact. For checked copies.
//
// Throws std::bad_alloc.
bool are_disjoint(const mht_copy_table& table, int64_t* row);

}  // namespace mht

#endif  // MHT_SRC_CHECK_H_
