// c10d's Gloo header includes this one and needs nothing from it.
#pragma once
