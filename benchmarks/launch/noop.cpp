// Two ranks meet and part: what is measured is starting them.

#include "lockstep/distributed/collectives.h"
#include "lockstep/distributed/process_group.h"

int main() {
  lockstep::init_process_group();
  lockstep::barrier();
  lockstep::destroy_process_group();
}
