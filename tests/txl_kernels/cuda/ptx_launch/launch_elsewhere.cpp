// Where launches go; Python sets it.
#include "simt_emulation.h"

LaunchElsewhere txl_launch_elsewhere = nullptr;
